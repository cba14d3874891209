"""Wrong checkpoints: a strict loader ends as the cases say, and every way of passing over what is wrong is seen."""

from __future__ import annotations

import pytest
import torch

from cases.bad_checkpoints import CLAIMS, EXPECTED, FILES, Bad, BadCheckpoint, Expect, bad_checkpoints
from cases.case import Entry, MoECase
from cases.checkpoint import make_checkpoint
from cases.spoil import spoil
from harness.backends import Backend
from harness.load_run import ask
from harness.pairs import Pair
from harness.subject.fake_loading import FakeLoading, LoadFault
from harness.subject.loading import Loads
from harness.verdict import Outcome, Verdict

EVERY = bad_checkpoints()
SPOILED = [each for each in EVERY if each.bad is not Bad.CUT_GROUP]  # of which it is the ranks that are wrong: test_load_shards.py
LANE = Backend.INTERPRETER
CHANNEL = "e4m3fn-channel-dyntoken-ct-silu-bf16-e4k2m8h128i64-balanced"
STATIC = "e4m3fn-tensor-static-quark-silu-bf16-e4k2m8h128i64-balanced"


def became(bad: Bad, text: str, fault: LoadFault | None = None) -> Verdict:
    return ask(bad, Pair(MoECase.from_id(text), Entry.LAYER), LANE, FakeLoading(LANE, fault)).verdict


def test_every_kind_has_a_claim_an_expectation_and_a_case() -> None:
    assert set(CLAIMS) == set(EXPECTED) == {each.bad for each in EVERY} == set(Bad)
    assert isinstance(FakeLoading(LANE), Loads)


@pytest.mark.parametrize("wrong", SPOILED, ids=lambda wrong: f"{wrong.bad}-{wrong.case.id}")
def test_a_strict_loader_is_not_accused(wrong: BadCheckpoint) -> None:
    verdict = became(wrong.bad, wrong.case.id)
    assert verdict.outcome is Outcome.PASS, verdict.detail


@pytest.mark.parametrize("wrong", [each for each in SPOILED if each.bad not in FILES], ids=lambda wrong: f"{wrong.bad}-{wrong.case.id}")
def test_what_is_spoiled_is_what_is_named(wrong: BadCheckpoint) -> None:
    sound = make_checkpoint(wrong.case)
    before = {name: tensor.clone() for name, tensor in sound.tensors.items()}
    spoiled = spoil(wrong.bad, wrong.case, sound)
    after = spoiled.checkpoint.tensors
    assert before.keys() == sound.tensors.keys()
    assert all(_same(before[name], sound.tensors[name]) for name in before)
    changed = {name for name in before | after if name not in after or name not in before or not _same(before[name], after[name])}
    beside = {f"{spoiled.expert}.down_proj.weight"} if wrong.bad is Bad.NEGATIVE_SCALE else set()  # INT8's -128 has no opposite
    assert changed - beside <= set(spoiled.names)
    assert changed


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    alike = left.shape == right.shape and left.dtype == right.dtype
    return alike and torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("bad", [bad for bad in Bad if EXPECTED[bad] is Expect.REFUSED])
def test_silence_and_errors_without_a_name_are_seen(bad: Bad) -> None:
    text = STATIC if bad is Bad.MISSING_INPUT_SCALE else CHANNEL
    silent, unnamed = (became(bad, text, fault) for fault in (LoadFault.ANYTHING_ACCEPTED, LoadFault.NOTHING_NAMED))
    assert (silent.outcome, silent.signature) == (Outcome.NOT_IDENTICAL, "ACCEPTED")
    assert (unnamed.outcome, unnamed.signature) == (Outcome.NOT_IDENTICAL, "UNNAMED:ValueError")


@pytest.mark.parametrize(
    ("bad", "text", "fault", "signature"),
    [
        (Bad.NAN_SCALE, CHANNEL, LoadFault.FINITE_FOR_NAN, "ZEROS"),
        (Bad.INF_SCALE, STATIC, LoadFault.FINITE_FOR_NAN, "ZEROS"),
        (Bad.NAN_WEIGHT, CHANNEL, LoadFault.FINITE_FOR_NAN, "ZEROS"),
        (Bad.ZERO_SCALE, CHANNEL, LoadFault.NAN_FOR_ZERO, "NAN"),
        (Bad.UNEQUAL_INPUT_SCALES, STATIC, LoadFault.LAST_INPUT_SCALE, "WRONG"),
    ],
)
def test_a_wrong_answer_is_seen(bad: Bad, text: str, fault: LoadFault, signature: str) -> None:
    verdict = became(bad, text, fault)
    assert (verdict.outcome, verdict.signature) == (Outcome.NOT_IDENTICAL, signature)
    assert verdict.detail
