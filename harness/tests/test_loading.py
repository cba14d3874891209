"""The loading oracles: silent over an honest loader on every case of smoke, and each seen to speak of a planted fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cases.bad_checkpoints import Bad
from cases.case import Entry, Level, MoECase
from cases.checkpoint import make_checkpoint
from cases.memory import memory_cases
from harness import load_oracles
from harness.backends import Backend
from harness.load_oracles import CLAIMS, Finding, Oracle
from harness.load_run import ask
from harness.loading import Asked, Question, applies, questions
from harness.pairs import select
from harness.subject.fake_loading import FakeLoading, LoadFault, reads
from harness.subject.loading import Allocated, Loading, WatchedLoading
from harness.verdict import Outcome, Verdict

LANE = Backend.INTERPRETER
SMOKE = questions(Level.SMOKE, LANE)
SMALL, BLOCKS = "e4k2m8h128i64-balanced", "e4k2m8h256i128-balanced"
CHANNEL, TENSOR = f"e4m3fn-channel-dyntoken-ct-silu-bf16-{SMALL}", f"e4m3fn-tensor-static-quark-silu-bf16-{SMALL}"
ONLINE, BLOCK = f"e4m3fn-channel-dyntoken-online-silu-bf16-{SMALL}", f"e4m3fn-block128-dyngroup128-vllmfp8-silu-bf16-{BLOCKS}"
WORDS, NVFP4 = f"int4-group32-none-ct-silu-bf16-{SMALL}", f"e2m1-group16-dyngroup16-modelopt-silu-bf16-{SMALL}"
SINGLE = f"int8-channel-dyntoken-ct-relu2_no_mul-bf16-{SMALL}"


def answer(text: str, fault: LoadFault | None, question: Question = Question.LOADED) -> Verdict:
    layer = select(Level.SMOKE, [text], Entry.LAYER)[0]
    return ask(question, layer, LANE, FakeLoading(LANE, fault)).verdict


def test_the_fake_can_be_watched() -> None:
    assert isinstance(FakeLoading(LANE), WatchedLoading)


@pytest.mark.parametrize(
    "asked", [asked for asked in SMOKE if reads(asked.pair.case) and asked.question is not Bad.CUT_GROUP], ids=lambda asked: str(asked.id)
)
def test_an_honest_loader_is_not_accused(asked: Asked) -> None:
    verdict = ask(asked.question, asked.pair, LANE, FakeLoading(LANE)).verdict
    assert verdict.outcome is Outcome.PASS, verdict.detail


CAUGHT = [  # fault, case, what the signature must hold
    (LoadFault.HALVES_SWAPPED, CHANNEL, "NOT_DECODED:weight+"),
    (LoadFault.HALVES_SWAPPED, TENSOR, "NOT_DECODED:weight_scale"),
    (LoadFault.EXPERTS_SWAPPED, CHANNEL, "NOT_DECODED:weight"),
    (LoadFault.SCALE_DROPPED, CHANNEL, "NOT_DECODED:weight_scale"),
    (LoadFault.SCALE_DROPPED, CHANNEL, "SENTINEL_LEFT:w13_weight_scale"),
    (LoadFault.SCALE_OF_NEIGHBOUR, BLOCK, "NOT_DECODED:weight_scale_inv"),
    (LoadFault.UP_SCALE_IS_GATES, TENSOR, "NOT_DECODED:weight_scale"),
    (LoadFault.UP_SCALE_IS_GATES, BLOCK, "NOT_DECODED:weight_scale_inv"),
    (LoadFault.BIAS_DROPPED, f"{CHANNEL}-bias", "UNCONSUMED:bias"),
    (LoadFault.BIAS_DROPPED, f"{CHANNEL}-bias", "NO_PLACE:bias"),
    (LoadFault.ROWS_DOUBLED, SINGLE, "SIZE:weight+SIZE:weight_scale"),
    (LoadFault.COLUMN_UNWRITTEN, SINGLE, "SENTINEL_LEFT:w2_weight"),
    (LoadFault.COLUMN_UNWRITTEN, CHANNEL, "NOT_DECODED:weight"),
    (LoadFault.UNKNOWN_TAKEN, CHANNEL, "UNKNOWN_ACCEPTED:silent"),
    (LoadFault.UNKNOWN_UNNAMED, CHANNEL, "UNKNOWN_ACCEPTED:unnamed"),
    (LoadFault.HANDED_BEFORE_INSTALLED, ONLINE, "HANDED:fake_converter:weight_scale"),
    (LoadFault.HANDED_UNQUANTIZED, ONLINE, "HANDED:fake_converter:weight"),
    (LoadFault.STALE_SCALE, TENSOR, "HANDED:fake_converter:weight_scale"),
    (LoadFault.STALE_SCALE, TENSOR, "LEFT:layer:weight_scale"),
    (LoadFault.NIBBLES_SWAPPED, WORDS, "HANDED:fake_converter:weight+LEFT:layer:weight"),
    (LoadFault.NIBBLES_SWAPPED, NVFP4, "HANDED:fake_converter:weight+LEFT:layer:weight"),
    (LoadFault.HANDED_BEFORE_INSTALLED, NVFP4, "HANDED:fake_converter:weight_scale"),
    (LoadFault.HALVES_SWAPPED, WORDS, "HANDED:fake_converter:weight"),
    (LoadFault.EXPERTS_SWAPPED, f"uint4-group32-none-ct-silu-bf16-{SMALL}", "HANDED:fake_converter:weight"),
    (LoadFault.SCALE_OF_NEIGHBOUR, f"e4m3fn-group32-dyngroup32-modelopt-silu-bf16-{SMALL}", "HANDED:fake_converter:weight_scale"),
    (LoadFault.CODES_TRUNCATED, f"int8-channel-none-online-silu-bf16-{SMALL}", "LEFT:layer:weight"),
]


@pytest.mark.parametrize("question", [Question.DIRECTORY, Question.STACKED])
def test_a_directory_read_otherwise_is_seen(question: Question) -> None:
    verdict = answer(CHANNEL, LoadFault.SHARDS_OUT_OF_ORDER, question)
    assert verdict.outcome is Outcome.NOT_IDENTICAL
    assert verdict.signature == f"DEPTHS_DIFFER:{question}"
    assert "w13_weight: " in verdict.detail


@pytest.mark.parametrize("case", [case for case in memory_cases() if reads(case)], ids=lambda case: str(case.id))
def test_full_size_temporaries_are_seen_and_outputs_are_not(case: MoECase) -> None:
    honest, wasteful = (answer(case.id, fault, Question.MEMORY) for fault in (None, LoadFault.FULL_SIZE_TEMPORARIES))
    assert honest.outcome is Outcome.PASS, honest.detail
    assert (wasteful.outcome, wasteful.signature) == (Outcome.NOT_IDENTICAL, "PEAK:conversion")
    assert wasteful.margin is not None  # the ledger bounds it
    assert wasteful.margin > 1


@pytest.mark.parametrize("requantized", [False, True])
def test_what_one_expert_and_all_scales_take_is_allowed_to_the_byte(requantized: bool) -> None:
    """Of 256 x 256 weights, the larger matrix: in bf16, fp32 and codes of up to four bytes; and 16 x (256 + 256) scales in fp32, twice."""
    case = MoECase.from_id("e4m3fn-channel-dyntoken-online-silu-bf16-e16k1m3h256i128-balanced")
    allowed = 7777 + 256 * 256 * (2 + 4 + 4 + 8 * requantized) + 2 * 4 * 16 * 512
    honest = FakeLoading(LANE).watch_loading(case, make_checkpoint(case))

    def found(taken: int) -> list[Finding]:
        seen = replace(honest, allocated=Allocated(peak=taken, kept=7777, largest=0))
        return list(load_oracles.peak(case, seen, requantized=requantized))

    assert found(allowed) == []
    (over,) = found(allowed + 1)
    assert over.over == (allowed + 1) / allowed
    assert f"{allowed + 1} bytes at the peak, of which 7777 stay" in over.text


@pytest.mark.parametrize(("backend", "outcome"), [(Backend.TRITON, Outcome.PASS), (LANE, Outcome.NOT_IDENTICAL)])
def test_memory_of_the_first_loading_counts_where_nothing_is_compiled_in_it(backend: Backend, outcome: Outcome) -> None:
    class CompilesAtFirst(FakeLoading):
        loadings = 0

        def watch_loading(self, *args: Any, **kwargs: Any) -> Loading:
            seen = super().watch_loading(*args, **kwargs)
            assert seen.allocated is not None
            self.loadings += 1
            return seen if self.loadings > 1 else replace(seen, allocated=replace(seen.allocated, peak=2**30))

    layer = select(Level.SMOKE, [memory_cases()[0].id], Entry.LAYER)[0]
    assert ask(Question.MEMORY, layer, backend, CompilesAtFirst(backend)).verdict.outcome is outcome


@pytest.mark.parametrize(("fault", "text", "signature"), CAUGHT, ids=lambda value: getattr(value, "name", value))
def test_a_planted_fault_is_seen(fault: LoadFault, text: str, signature: str) -> None:
    verdict = answer(text, fault)
    assert verdict.outcome is Outcome.NOT_IDENTICAL
    assert signature in verdict.signature
    assert verdict.detail


def test_a_swap_is_named() -> None:
    assert "these are 0.up_proj.weight's values" in answer(CHANNEL, LoadFault.HALVES_SWAPPED).detail


def test_what_a_configuration_refuses_is_asked_of_layers_only() -> None:
    """ModelOpt's MXFP8 says bf16 alone; seen on an H200, where VllmConfig raised ValidationError."""
    half, own, others = (
        MoECase.from_id(f"e4m3fn-group32-dyngroup32-{each}-e8k2m33h256i128-single")
        for each in ("modelopt-silu-fp16", "modelopt-silu-bf16", "ct-silu-fp16")
    )
    asked = [[question for question in (Question.LOADED, Question.DIRECTORY) if applies(question, case)] for case in (half, own, others)]
    assert asked == [[Question.LOADED], [Question.LOADED, Question.DIRECTORY], [Question.LOADED, Question.DIRECTORY]]


def test_every_oracle_has_a_claim() -> None:
    assert set(CLAIMS) == set(Oracle)


def test_ids_say_the_question() -> None:
    assert SMOKE[0].id.startswith("loaded:")
    assert len({asked.id for asked in SMOKE}) == len(SMOKE)
    assert {asked.question for asked in SMOKE} == {*Question, *Bad}
    assert MoECase.from_id(SMOKE[0].pair.case.id) == SMOKE[0].pair.case
    assert make_checkpoint(SMOKE[0].pair.case).tensors
