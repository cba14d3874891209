"""A known fault must not hide a smaller one: only an output that lies in the faulty layer's own interval bears the fault's name alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cases.batch import make_batch
from cases.case import Entry, MoECase
from cases.checkpoint import make_checkpoint
from harness import expected, judge, ledger
from harness.backends import Backend
from harness.compare import compare
from harness.explained import EXPLAINS, NO_INTERVAL, has_interval, left, no_interval, with_faults
from harness.faults import Fault, applicable
from harness.fit import NOT_FITTED, evaluate, fit
from harness.inject import Inputs, changed, contributions, with_all
from harness.inject_gains import gained, target
from harness.ledger import Standing
from harness.recipes import recipe
from harness.subject import fake, fake_kernel
from harness.verdict import FaultFit, Outcome, Verdict
from references.answer import answer_of
from references.formats import round_to, torch_dtype
from references.loading import load
from references.moe import Answer
from references.vocabulary import RouterWeight

FUSED, LAYER = Entry.FUSED_EXPERTS, Entry.LAYER
INTERPRETER, MARLIN, CUTLASS, EMULATION = Backend.INTERPRETER, Backend.MARLIN, Backend.CUTLASS, Backend.EMULATION
FLAT = MoECase.from_id("int8-channel-static-quark-silu-fp16-e4k2m8h128i64-balanced")
WNA16 = MoECase.from_id("int4-group32-none-ct-silu-bf16-e4k2m8h128i64-balanced-bias")
GPTQ = MoECase.from_id("int4-group32-none-gptq-silu-bf16-e5k3m3h192i96-balanced")
AWQ = MoECase.from_id("uint4-group64-none-awq-silu-bf16-e4k2m8h128i64-balanced-bias")
THREE = MoECase.from_id("uint4-group128-none-awq-gelu_tanh-fp16-e3k1m129h128i256-balanced-bias-norenorm-onin")
ON_INPUT = MoECase.from_id("e4m3fn-channel-dyntoken-ct-silu-bf16-e4k1m17h64i32-balanced-bias-norenorm-onin")
W4A8 = MoECase.from_id("int4-group128-dyntoken-ct-gelu_tanh-bf16-e4k1m17h256i256-balanced-norenorm-onin")
GPT_OSS = MoECase.from_id("e2m1-group32-none-gptoss-swigluoai-bf16-e4k1m17h64i32-balanced-norenorm-onin")
VLLM = "0.33.0"
"""Of the ledger's entries."""


class Pair:
    """A pair's reference, and an honest kernel that has faults."""

    def __init__(self, case: MoECase, entry: Entry, backend: Backend = INTERPRETER) -> None:
        self.case, self.entry, self.backend = case, entry, backend
        self.recipe = recipe(case, entry, backend)
        self.checkpoint, self.batch = make_checkpoint(case), make_batch(case)
        self.answer: Answer = expected.expected(case, self.recipe, self.checkpoint, self.batch)

    def inputs(self, *, of_the_fake: bool = False) -> Inputs:
        stored = expected.experts(self.case, self.checkpoint)
        return Inputs(
            experts=stored,
            loaded=fake_kernel.load(stored, self.recipe) if of_the_fake else load(stored, self.recipe),
            hidden_states=self.batch.hidden_states,
            router_logits=self.batch.router_logits,
            routing=self.answer.routing,
            renormalize=self.case.renormalize,
            activation=self.case.activation,
            recipe=self.recipe,
        )

    def numbers(self, *faults: Fault) -> torch.Tensor:
        """Contributions by the reference."""
        return with_all(faults, self.inputs(), evaluate)

    def stored(self, given: torch.Tensor) -> torch.Tensor:
        return round_to(given.sum(1), self.recipe.output).to(torch_dtype(self.recipe.output))

    def fake(self, *faults: Fault) -> torch.Tensor:
        return fake_kernel.combine(with_all(faults, self.inputs(of_the_fake=True), fake.evaluate), self.recipe)

    def judged(self, actual: torch.Tensor) -> Verdict:
        comparison = compare(self.answer, actual)
        return judge.judge(self.case, self.recipe, self.checkpoint, self.batch, self.answer, actual, comparison)

    def standing(self, verdict: Verdict) -> Standing:
        return ledger.load().judge(verdict, self.case.id, self.entry, self.backend, VLLM).standing

    def second(self, given: torch.Tensor, share: float) -> torch.Tensor:
        """``given`` with the largest expert's contributions moved by ``share`` of what is wrong already, rows counted alike."""
        scale = self.answer.expected.square().mean(1, keepdim=True).sqrt()
        scale = scale.masked_fill(scale == 0, 1.0)
        moved = gained(given, self.answer.routing, 2.0, target(given, self.answer.routing)[0]) - given
        size = share * float(((given.sum(1) - self.answer.expected) / scale).norm() / (moved.sum(1) / scale).norm())
        return given + moved * size


KNOWN = [
    (FLAT, FUSED, INTERPRETER, (Fault.W_SCALE_FLAT_INDEX,)),
    (WNA16, LAYER, INTERPRETER, (Fault.BIAS_DROPPED,)),
    (GPTQ, LAYER, EMULATION, (Fault.ZERO_POINTS_AS_STORED,)),
    (AWQ, LAYER, MARLIN, (Fault.BIAS_DROPPED, Fault.W13_SCALES_IN_ORDER_OF_CHANNELS)),
    (
        THREE,
        LAYER,
        MARLIN,
        (Fault.BIAS_DROPPED, Fault.ROUTER_WEIGHT_TWICE_ON_INPUT, Fault.W13_SCALES_IN_ORDER_OF_GROUPS),
    ),
    (ON_INPUT, LAYER, MARLIN, (Fault.BIAS_DROPPED, Fault.ROUTER_WEIGHT_TWICE_ON_INPUT)),
    (ON_INPUT, LAYER, CUTLASS, (Fault.BIAS_DROPPED, Fault.ROUTER_WEIGHT_TWICE)),
    (W4A8, LAYER, CUTLASS, (Fault.ROUTER_WEIGHT_TWICE,)),
]


@pytest.mark.parametrize(("case", "entry", "backend", "faults"), KNOWN, ids=lambda value: str(getattr(value, "id", value)))
def test_a_second_fault_of_a_fiftieth_is_not_hidden(case: MoECase, entry: Entry, backend: Backend, faults: tuple[Fault, ...]) -> None:
    pair = Pair(case, entry, backend)
    given = pair.numbers(*faults)
    alone, both = pair.judged(pair.stored(given)), pair.judged(pair.stored(pair.second(given, 1 / 50)))
    name = "+".join(fault.name for fault in faults)
    assert alone.signature.partition("@")[0] == name
    assert pair.standing(alone) is Standing.KNOWN
    assert both.fits[0].residual <= EXPLAINS  # by that alone it had the same name
    assert both.signature.endswith("+UNEXPLAINED")
    assert pair.standing(both) is Standing.FAILS_DIFFERENTLY
    assert "are not among the results of a layer with " in both.detail


def test_no_entry_of_the_ledger_knows_what_is_unexplained_beside_a_fault() -> None:
    beside = [f"{fault.name}{experts}+UNEXPLAINED" for fault in Fault for experts in ("", "@all", "@1,3")]
    known = {pattern for issue in ledger.load().issues for pattern in issue.signature}
    assert not [(pattern, name) for pattern in known for name in beside if ledger.matches(name, pattern)]
    assert ledger.matches(beside[0], f"{Fault.ZERO_OUTPUT.name}*")


def test_every_fault_that_the_ledger_knows_in_dense_pairs_has_an_interval() -> None:
    dense = [pattern for issue in ledger.load().issues if issue.outcome is Outcome.MISMATCH for pattern in issue.signature]
    known = {Fault[name] for pattern in dense for name in pattern.partition("@")[0].split("+")}
    by_lane = {Fault.ROUTER_WEIGHT_TWICE, Fault.ROUTER_WEIGHT_TWICE_ON_INPUT}  # where they are seen
    assert by_lane <= known
    assert not (known - by_lane) & set(NO_INTERVAL)


CASES = {
    "int8 channels": (FLAT, FUSED),
    "int8 tensors": (MoECase.from_id("int8-tensor-static-quark-silu-fp16-e4k2m8h128i64-balanced-norenorm"), FUSED),
    "int8 tokens, biased": (MoECase.from_id("int8-channel-dyntoken-quark-gelu-bf16-e4k2m8h128i64-balanced-bias-norenorm"), FUSED),
    "fp8 blocks": (MoECase.from_id("e4m3fn-block128-dyngroup128-quark-silu-bf16-e4k2m8h384i256-balanced"), FUSED),
    "fp8 tensors": (MoECase.from_id("e4m3fn-tensor-static-quark-silu-fp32-e4k2m8h128i64-balanced"), FUSED),
    "words": (WNA16, LAYER),
    "zero points": (MoECase.from_id("uint4-group128-none-ct-silu-bf16-e4k2m8h128i128-balanced"), LAYER),
    "limits": (MoECase.from_id("bf16-none-none-plain-situ-bf16-e4k2m8h128i64-balanced-norenorm-tight"), LAYER),
    "mxfp4 on the input": (MoECase.from_id("e2m1-group32-none-gptoss-swigluoai-bf16-e4k1m17h64i32-balanced-norenorm-onin"), LAYER),
}


def everywhere(fault: Fault) -> FaultFit:
    return FaultFit(fault=fault.name, experts=(), residual=0.0)


@pytest.mark.parametrize("name", CASES)
def test_an_honest_kernel_with_a_fault_is_all_explained_by_it(name: str) -> None:
    pair = Pair(*CASES[name])
    inputs = pair.inputs()
    asked = [fault for fault in Fault if applicable(fault, pair.case, pair.recipe) and no_interval(fault, inputs) is None]
    assert asked
    for fault in asked:
        beyond = left(everywhere(fault), inputs, pair.fake(fault))
        assert not beyond, (fault, beyond)
        assert left(everywhere(fault), inputs, pair.fake()), fault  # and an honest layer is not


def test_a_fault_that_changes_no_input_is_declared() -> None:
    inputs = [Pair(case, LAYER, backend).inputs() for case, backend in ((WNA16, INTERPRETER), (ON_INPUT, MARLIN), (ON_INPUT, CUTLASS))]
    for fault in Fault:
        for each in inputs:
            if applicable(fault, WNA16, each.recipe) and changed(fault, each) is each:
                assert no_interval(fault, each) is not None, fault
    assert all(reason for reason in NO_INTERVAL.values())
    assert set(NO_INTERVAL) >= NOT_FITTED


def test_where_marlin_weights_gemm_1_its_global_scale_leaves_the_sums() -> None:
    pair = Pair(MoECase.from_id("e2m1-group16-dyngroup16-modelopt-gelu_tanh-bf16-e4k1m17h64i32-balanced-norenorm-onin"), LAYER, MARLIN)
    inputs = pair.inputs()
    faulty = with_faults(everywhere(Fault.ROUTER_WEIGHT_TWICE_ON_INPUT), inputs)
    for before, after in zip(inputs.loaded, faulty.loaded, strict=True):
        assert before.w13.outer is not None
        assert after.w13.outer is not None
        assert torch.equal(after.w13.outer * after.first_router_factor, before.w13.outer)
        assert torch.equal(torch.frexp(after.w13.outer)[0], torch.full_like(after.w13.outer, 0.5))
        assert after.w2 is before.w2
    assert not left(everywhere(Fault.ROUTER_WEIGHT_TWICE_ON_INPUT), inputs, pair.stored(pair.numbers(Fault.ROUTER_WEIGHT_TWICE_ON_INPUT)))


@pytest.mark.parametrize(("backend", "fault"), [(MARLIN, Fault.ROUTER_WEIGHT_TWICE_ON_INPUT), (CUTLASS, Fault.ROUTER_WEIGHT_TWICE)])
def test_where_no_lane_weights_twice_there_is_no_interval(backend: Backend, fault: Fault) -> None:
    there, here = Pair(ON_INPUT, LAYER, backend).inputs(), Pair(ON_INPUT, LAYER).inputs()
    assert has_interval(everywhere(fault), there)
    assert not has_interval(everywhere(fault), here)
    assert (
        no_interval(fault, replace(there, recipe=Pair(replace(ON_INPUT, router_weight_on_input=False), LAYER, backend).recipe)) is not None
    )


@pytest.mark.parametrize(
    ("case", "backend", "fault", "place"),
    [
        (ON_INPUT, MARLIN, Fault.ROUTER_WEIGHT_TWICE_ON_INPUT, RouterWeight.FIRST_STORED),
        (ON_INPUT, CUTLASS, Fault.ROUTER_WEIGHT_TWICE, RouterWeight.SUM),
        (W4A8, CUTLASS, Fault.ROUTER_WEIGHT_TWICE, RouterWeight.SUM),
        (GPT_OSS, Backend.TRITON, Fault.ROUTER_WEIGHT_TWICE, RouterWeight.GEMM2),
        (GPT_OSS, Backend.TRITON_UNFUSED, Fault.ROUTER_WEIGHT_TWICE_ON_INPUT, RouterWeight.GEMM1),
    ],
)
def test_lanes_weight_again_where_their_sources_do(case: MoECase, backend: Backend, fault: Fault, place: RouterWeight) -> None:
    pair = Pair(case, LAYER, backend)
    assert changed(fault, pair.inputs()).recipe.router_weight_again is place
    assert pair.judged(pair.stored(pair.numbers(fault))).signature == fault.name


TOKENS = MoECase.from_id("int8-channel-dyntoken-quark-gelu-bf16-e4k2m8h128i64-balanced-bias-norenorm")


@pytest.mark.parametrize(
    ("case", "fault", "name"),
    [
        (FLAT, Fault.TOPK_SLOT_DROPPED, "TOPK_SLOT_DROPPED"),
        (FLAT, Fault.A2_SCALE_NOT_APPLIED, "A2_SCALE_NOT_APPLIED@all"),
        (FLAT, Fault.A2_SCALE_APPLIED_TWICE, "A2_SCALE_APPLIED_TWICE@all"),
        (TOKENS, Fault.A1_SCALE_NOT_APPLIED, "A1_SCALE_NOT_APPLIED"),
        (TOKENS, Fault.A1_SCALE_APPLIED_TWICE, "A1_SCALE_APPLIED_TWICE"),
        (TOKENS, Fault.A_SCALE_OF_TOKEN_ZERO, "A_SCALE_OF_TOKEN_ZERO"),
        (TOKENS, Fault.W13_SCALE_APPLIED_TWICE, "W13_SCALE_APPLIED_TWICE@all"),
        (TOKENS, Fault.W2_SCALE_APPLIED_TWICE, "W2_SCALE_APPLIED_TWICE@all"),
        (TOKENS, Fault.W13_INVERSE_SCALE, "W13_INVERSE_SCALE@all"),
        (TOKENS, Fault.W2_INVERSE_SCALE, "W2_INVERSE_SCALE@all"),
        (TOKENS, Fault.UP_PLUS_ONE, "UP_PLUS_ONE@all"),
        (TOKENS, Fault.ACTIVATIONS_NOT_QUANTIZED, "ACTIVATIONS_NOT_QUANTIZED"),
    ],
)
def test_a_fault_without_an_interval_may_still_be_named_by_what_it_leaves(case: MoECase, fault: Fault, name: str) -> None:
    pair = Pair(case, FUSED)
    given = contributions(fault, pair.inputs(), evaluate)
    assert pair.judged(pair.stored(given)).signature == name
    assert pair.judged(pair.stored(pair.second(given, 1 / 50))).signature == name


def test_a_fault_without_an_interval_names_nothing_where_one_with_an_interval_comes_near() -> None:
    """Scaled biases are next to dropped ones, which this is with a second fault."""
    pair = Pair(WNA16, LAYER)
    dropped, scaled = (pair.numbers(fault).sum(1) for fault in (Fault.BIAS_DROPPED, Fault.BIAS_SCALED))
    between = dropped + (scaled - dropped) * 0.9
    verdict = pair.judged(round_to(between, pair.recipe.output).to(torch_dtype(pair.recipe.output)))
    assert verdict.fits[0].fault == "BIAS_SCALED"
    assert verdict.signature == "BIAS_DROPPED@all+UNEXPLAINED"


def test_a_fault_within_roundings_explains_all_the_same() -> None:
    """Router weights near 1: what weighting twice adds is hardly more than codes that fall the other way."""
    pair = Pair(replace(ON_INPUT, bias=False), LAYER, CUTLASS)
    faulty = with_faults(everywhere(Fault.ROUTER_WEIGHT_TWICE), pair.inputs())
    room = answer_of(faulty.loaded, faulty.hidden_states, faulty.routing, faulty.activation, faulty.recipe)
    anywhere = torch.rand(room.low.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    actual = room.low + (room.high - room.low) * anywhere
    verdict = pair.judged(round_to(actual, pair.recipe.output).to(torch_dtype(pair.recipe.output)))
    assert verdict.signature == "ROUTER_WEIGHT_TWICE"
    assert verdict.fits[0].residual > EXPLAINS
    assert verdict.detail == "all elements are among the results of a layer with ROUTER_WEIGHT_TWICE"


def test_what_a_lane_is_known_to_do_is_asked_where_it_is_too_small_to_have_to_be_caught() -> None:
    """Two experts, a router weight of 0.998: beside biases in another order, seen on an H200."""
    pair = Pair(MoECase.from_id("e4m3fn-tensor-static-vllmfp8-gelu-fp16-e2k1m1h256i128-single-bias-norenorm-onin"), LAYER, MARLIN)
    faults = (Fault.BIAS_NOT_PERMUTED, Fault.ROUTER_WEIGHT_TWICE_ON_INPUT)
    assert not applicable(faults[1], pair.case, pair.recipe)
    assert pair.judged(pair.stored(pair.numbers(*faults))).signature == "BIAS_NOT_PERMUTED+ROUTER_WEIGHT_TWICE_ON_INPUT"
    assert pair.judged(pair.stored(pair.numbers(faults[0]))).signature == "BIAS_NOT_PERMUTED@all"


def test_the_experts_that_a_fault_is_granted_to_are_the_ones_that_have_it() -> None:
    pair = Pair(WNA16, LAYER)
    inputs, whole = pair.inputs(), FaultFit(fault="BIAS_DROPPED", experts=(0, 1, 2, 3), residual=0.0)
    actual = pair.stored(pair.numbers(Fault.BIAS_DROPPED))
    assert not left(whole, inputs, actual)
    assert left(replace(whole, experts=(1, 3)), inputs, actual)
    has_it = torch.isin(inputs.routing.topk_ids, torch.tensor([1, 3])).unsqueeze(2)
    partly = pair.stored(torch.where(has_it, pair.numbers(Fault.BIAS_DROPPED), pair.numbers()))
    assert not left(replace(whole, experts=(1, 3)), inputs, partly)
    assert left(whole, inputs, partly)


def test_an_expert_whose_share_roundings_hide_has_the_fault_too() -> None:
    """Seen on an H200: one of twelve experts in use has so small a router weight that least squares say no."""
    case = MoECase.from_id("int4-group64-none-gptq-relu2_no_mul-bf16-e40k4m3h128i64-balanced-norenorm")
    pair = Pair(case, LAYER, EMULATION)
    actual = pair.fake(Fault.ZERO_POINTS_AS_STORED)
    (granted,) = fit(pair.inputs(), pair.answer, actual, [Fault.ZERO_POINTS_AS_STORED])
    assert len(granted.experts) == 11
    assert len(set(pair.answer.routing.topk_ids.flatten().tolist())) == 12
    assert pair.judged(actual).signature == "ZERO_POINTS_AS_STORED@all"


def test_a_fault_of_the_numbers_is_no_excuse_for_a_gain_over_it() -> None:
    """Inside every interval, and a factor on average."""
    pair = Pair(FLAT, FUSED)
    given = pair.numbers(Fault.W_SCALE_FLAT_INDEX)
    alone = left(everywhere(Fault.W_SCALE_FLAT_INDEX), pair.inputs(), pair.stored(given))
    assert (alone.elements, alone.groups) == (0, 0)
    expert = target(given, pair.answer.routing)[0]
    beyond = left(everywhere(Fault.W_SCALE_FLAT_INDEX), pair.inputs(), pair.stored(gained(given, pair.answer.routing, 1.008, expert)))
    assert beyond.groups > 0
    assert beyond.of == pair.answer.expected.numel()
    assert pair.judged(pair.stored(given)).outcome is Outcome.MISMATCH
