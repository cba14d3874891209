from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cases.batch import make_batch
from cases.case import Entry, MoECase
from cases.checkpoint import make_checkpoint
from harness import judge
from harness.backends import Backend
from harness.compare import compare
from harness.environment import WITHOUT_VLLM, environment
from harness.expected import expected
from harness.faults import Fault, applicable
from harness.message import message
from harness.recipes import recipe
from harness.refusals import Refusal
from harness.subject.fake import FakeSubject
from harness.verdict import UNREASONED, FaultFit, Outcome, Verdict
from references.moe import Answer

CASE = MoECase.from_id("int8-channel-static-quark-silu-fp16-e4k2m8h128i64-balanced")
ENTRY = Entry.FUSED_EXPERTS
UNDERFLOWS = (Fault.W13_SCALE_APPLIED_TWICE, Fault.A1_SCALE_APPLIED_TWICE)  # here every code of the intermediate becomes 0


def verdict_of(actual: torch.Tensor, answer: Answer, repeat: torch.Tensor | None = None, case: MoECase = CASE) -> Verdict:
    how = recipe(case, ENTRY, Backend.INTERPRETER)
    comparison = compare(answer, actual, repeat=repeat)
    return judge.judge(case, how, make_checkpoint(case), make_batch(case), answer, actual, comparison)


def ran(fault: Fault | None, case: MoECase = CASE) -> tuple[torch.Tensor, Answer]:
    checkpoint, batch = make_checkpoint(case), make_batch(case)
    subject = FakeSubject(fault)
    answer = expected(case, recipe(case, ENTRY, Backend.INTERPRETER), checkpoint, batch)
    return subject.run(subject.load(case, ENTRY, checkpoint), batch).output, answer


def test_an_honest_result_passes_and_reports_its_gains() -> None:
    verdict = verdict_of(*ran(None))
    assert (verdict.outcome, verdict.signature, verdict.fits) == (Outcome.PASS, "", ())
    experts = verdict.gains["experts"]
    assert isinstance(experts, dict)
    assert all(abs(alpha - 1) < smallest for alpha, _, smallest in experts.values())


@pytest.mark.parametrize("fault", [f for f in Fault if applicable(f, CASE, recipe(CASE, ENTRY, Backend.INTERPRETER))])
def test_every_fault_is_named(fault: Fault) -> None:
    verdict = verdict_of(*ran(fault))
    assert verdict.outcome is Outcome.MISMATCH
    if fault in (Fault.EXPERT_GAIN_1_008, Fault.CHANNEL_GAIN_1_05):
        assert verdict.signature.startswith("GAIN@")
    else:
        assert verdict.signature.partition("@")[0] == ("ZERO_OUTPUT" if fault in UNDERFLOWS else fault.name)


def test_a_fault_on_some_experts_names_them() -> None:
    top1 = replace(CASE, top_k=1)
    wrong, answer = ran(Fault.W_SCALE_FLAT_INDEX, top1)
    honest, _ = ran(None, top1)
    only_three = (answer.routing.topk_ids == 3).any(1, keepdim=True)
    verdict = verdict_of(torch.where(only_three, wrong, honest), answer, case=top1)
    assert verdict.signature == "W_SCALE_FLAT_INDEX@3"
    assert verdict.pattern == "every bad token is routed to expert 3, and every token of expert 3 is bad"
    assert verdict_of(wrong, answer, case=top1).signature == "W_SCALE_FLAT_INDEX@all"


def test_what_no_fault_explains_is_said_so() -> None:
    actual, answer = ran(None)
    noise = torch.randn(actual.shape, generator=torch.Generator().manual_seed(0))
    verdict = verdict_of((actual.float() + noise).half(), answer)
    assert verdict.signature == "UNEXPLAINED"
    wrong = ran(Fault.W_SCALE_FLAT_INDEX)[0].float()
    spread = (wrong - actual.float()).square().mean().sqrt() / 2.0  # half as large as the fault itself
    assert verdict_of((wrong + noise * spread).half(), answer).signature == "UNEXPLAINED~W_SCALE_FLAT_INDEX"
    assert verdict_of((wrong + noise * 4.0 * spread).half(), answer).signature == "UNEXPLAINED"  # twice as large hides it
    assert verdict.worst["actual"] != verdict.worst["expected"]


def test_nan_infinity_attributes_and_two_runs() -> None:
    actual, answer = ran(None)
    holed = actual.clone()
    holed[2, 5] = math.nan
    verdict = verdict_of(holed, answer)
    assert (verdict.outcome, verdict.signature, verdict.spread["NaN on one side"]) == (Outcome.MISMATCH, "NAN", 1)
    assert verdict.worst["index"] == [2, 5]
    holed[2, 5] = math.inf
    assert verdict_of(holed, answer).signature == "INF"
    assert verdict_of(actual.float(), answer).signature == "ATTRIBUTES"
    again = actual.clone()
    again[0, 0] += 1
    verdict = verdict_of(actual, answer, repeat=again)
    assert (verdict.outcome, verdict.signature) == (Outcome.NONDETERMINISTIC, "NONDETERMINISTIC")


def test_a_gain_inside_the_interval_is_a_mismatch_all_the_same() -> None:
    actual, answer = ran(Fault.EXPERT_GAIN_1_008)
    wide = replace(answer, low=answer.expected - 1.0, high=answer.expected + 1.0)
    verdict = verdict_of(actual, wide)
    assert verdict.margin is not None
    assert verdict.margin < 1
    assert verdict.outcome is Outcome.MISMATCH
    assert verdict.signature.startswith("GAIN@")
    assert "differ by a factor" in verdict.claim


def test_what_raised_keeps_its_words() -> None:
    verdict = judge.raised(Outcome.LOAD_ERROR, "KeyError: 'weight_scale'\n  somewhere")
    assert (verdict.signature, verdict.detail) == ("KeyError: 'weight_scale'", "KeyError: 'weight_scale'\n  somewhere")
    assert judge.wrong_class("Other", ["TritonExperts"]).claim == "Other ran where TritonExperts was forced"


MESSAGE = """\
MISMATCH  int8-x[layer]  backend=interpreter
  claim    every element lies among the results an honest kernel may give; 3 of 8 do not
  worst    token 1, channel 3: actual 0.421875 (0x3ed8), expected 0.3374, allowed 0.33 to 0.34 before the last rounding; routed to 3, 0
  spread   3 of 8 elements, 1 of 2 tokens, 3 of 4 channels, experts of bad tokens: 0, 3
  pattern  every bad token is routed to expert 3
  gain     expert 3: 1.25 ± 0.001, honest within 0.006 of 1
  fits     STALE_ROW: the last token's row holds the first token's result (leaves 0.01 of the deviation); next UP_PLUS_ONE (0.5)
  named    STALE_ROW
  env      vllm 0.33.0 · torch 2.14.0
  again    moediff run int8-x --entry layer"""


def test_the_message() -> None:
    verdict = Verdict(
        outcome=Outcome.MISMATCH,
        claim="every element lies among the results an honest kernel may give; 3 of 8 do not",
        margin=17.0,
        worst={
            "index": [1, 3],
            "actual": 0.421875,
            "bits": "0x3ed8",
            "expected": 0.3374,
            "low": 0.33,
            "high": 0.34,
            "experts": [3, 0],
        },
        spread={"elements": [3, 8], "tokens": [1, 2], "channels": [3, 4], "experts of bad tokens": [0, 3]},
        pattern="every bad token is routed to expert 3",
        gains={
            "experts": {"3": [1.25, 0.001, 0.006]},
            "flagged": [{"group": "expert", "index": [3], "alpha": 1.25, "se": 0.001, "smallest": 0.006}],
            "flagged groups": 1,
        },
        fits=(
            FaultFit(fault="STALE_ROW", experts=(), residual=0.01),
            FaultFit(fault="UP_PLUS_ONE", experts=(1, 3), residual=0.5),
        ),
        signature="STALE_ROW",
    )
    again = "moediff run int8-x --entry layer"
    environment = {"vllm": "0.33.0", "torch": "2.14.0", "gpus": ""}
    assert message(verdict, pair="int8-x[layer]", backend="interpreter", environment=environment, again=again) == MESSAGE


def test_fits_name_experts_and_admit_that_nothing_fits() -> None:
    def fits(residual: float) -> str:
        verdict = Verdict(outcome=Outcome.MISMATCH, claim="c", fits=(FaultFit(fault="GATE_UP_SWAPPED", experts=(1, 3), residual=residual),))
        return message(verdict, pair="p", backend="b", environment={}, again="a").splitlines()[2]

    assert "GATE_UP_SWAPPED on experts 1, 3: gate and up (w1 and w3) are exchanged" in fits(0.01)
    assert "none of the named faults; the nearest, GATE_UP_SWAPPED, leaves 0.99" in fits(0.99)


def test_where_every_sum_is_exact_the_claim_is_equality() -> None:
    lattice = MoECase.from_id("int8-channel-dyntoken-quark-relu2_no_mul-bf16-e4k2m8h128i64-balanced-lattice")
    actual, answer = ran(None, lattice)
    assert torch.equal(answer.low, answer.high)
    passed = verdict_of(actual, answer, case=lattice)
    assert (passed.outcome, passed.margin) == (Outcome.PASS, 0.0)
    assert "the output equals the reference's" in passed.claim
    broken = verdict_of(*ran(Fault.STALE_ROW, lattice), case=lattice)
    assert (broken.outcome, broken.signature) == (Outcome.NOT_IDENTICAL, "STALE_ROW")


def test_a_refusal_without_a_reason_is_marked() -> None:
    refusal = Refusal(reason="groups only", says="AssertionError", applies=lambda case, entry: True, reasoned=False)
    bare, told = judge.refused(refusal, "AssertionError: "), judge.refused(replace(refusal, reasoned=True), "ValueError: groups only")
    assert (bare.outcome, bare.signature) == (Outcome.UNSUPPORTED, UNREASONED)
    assert (told.outcome, told.signature) == (Outcome.UNSUPPORTED, "")
    assert bare.claim == "refused without a reason: groups only"


def test_what_a_fake_shows_is_not_said_of_vllm() -> None:
    verdict = judge.raised(Outcome.LOAD_ERROR, "KeyError: 'weight_scale'")
    fake = {"subject": "fake", **environment(WITHOUT_VLLM)}
    assert not {"vllm", "triton"} & set(fake)
    assert "  env      fake · torch " in message(verdict, pair="p", backend="interpreter", environment=fake, again="moediff run")
