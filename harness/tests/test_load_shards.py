"""Layers divided among ranks: slices of a checkpoint are slices of its layer, and a loader that divides wrongly is seen."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from cases.bad_checkpoints import Bad
from cases.case import Entry, MoECase
from cases.checkpoint import make_checkpoint
from cases.sharding import slice_of
from cases.shards import RANKS, Shard, common_width, cut_cases, shard_cases, whole_groups
from harness import load_shards
from harness.backends import Backend
from harness.expected import experts
from harness.load_run import ask
from harness.loading import Question
from harness.pairs import Pair
from harness.subject.fake_loading import FakeLoading, LoadFault, reads
from harness.verdict import Outcome, Verdict
from references.moe import Projection
from references.shards import shard

LANE = Backend.INTERPRETER
CHANNEL = "e4m3fn-channel-dyntoken-quark-silu-bf16-e4k2m8h128i96-balanced-bias"
WORDS = "int4-group32-none-ct-silu-bf16-e4k2m8h128i96-balanced"
NVFP4 = "e2m1-group16-dyngroup16-modelopt-silu-bf16-e4k2m8h128i48-balanced"
READ = [case for case in shard_cases() if reads(case)]


def became(question: Question | Bad, text: str, fault: LoadFault | None = None) -> Verdict:
    return ask(question, Pair(MoECase.from_id(text), Entry.LAYER), LANE, FakeLoading(LANE, fault)).verdict


@pytest.mark.parametrize("case", shard_cases(), ids=lambda case: str(case.id))
def test_a_slice_of_the_file_is_a_slice_of_the_layer(case: MoECase) -> None:
    checkpoint = make_checkpoint(case)
    for rank in range(RANKS):
        smaller, part = slice_of(case, checkpoint, Shard(rank))
        for read, cut in zip(experts(smaller, part), shard(experts(case, checkpoint), rank, RANKS), strict=True):
            assert read.gate is None or alike(read.gate, cut.gate)
            assert alike(read.up, cut.up)
            assert alike(read.down, cut.down, but=("bias",) if rank else ())
            assert rank == 0 or cut.down.bias is None


def alike(left: Projection, right: Projection | None, but: tuple[str, ...] = ()) -> bool:
    pairs = [(getattr(left, field.name), getattr(right, field.name)) for field in fields(left) if field.name not in but]
    return all(torch.equal(a.float(), b.float()) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_cases_divide_where_they_say() -> None:
    assert all(whole_groups(case) for case in shard_cases())
    assert not any(whole_groups(case) for case in cut_cases())
    assert {common_width(case) is None for case in cut_cases()} == {True, False}


def test_a_cut_group_has_no_slice_of_its_own() -> None:
    case = MoECase.from_id(WORDS)
    with pytest.raises(ValueError, match=r"96 / 2 columns are no whole groups of 32"):
        slice_of(case, make_checkpoint(case), Shard(1))


def test_narrower_groups_hold_the_same_weights() -> None:
    case = MoECase.from_id(WORDS)
    stored = experts(case, make_checkpoint(case))
    down = stored[1].down
    assert down.scale is not None
    whole = down.codes.double() * down.scale.double().repeat_interleave(32, 1)
    for rank in range(RANKS):
        mine = shard(stored, rank, RANKS)[1].down
        assert mine.scale is not None
        assert mine.layout.width == 16
        assert torch.equal(mine.codes.double() * mine.scale.double().repeat_interleave(16, 1), whole[:, 48 * rank : 48 * rank + 48])


@pytest.mark.parametrize("case", READ, ids=lambda case: str(case.id))
def test_an_honest_loader_is_not_accused(case: MoECase) -> None:
    verdict = became(Question.SHARDED, case.id)
    assert verdict.outcome is Outcome.PASS, verdict.detail


@pytest.mark.parametrize(
    ("fault", "text", "signature"),
    [
        (LoadFault.RANKS_ALIKE, CHANNEL.removesuffix("-bias"), "SHARD:w13_weight+SHARD:w13_weight_scale+SHARD:w2_weight+SUM:output"),
        (LoadFault.BIAS_ON_EVERY_RANK, CHANNEL, "SUM:output"),
    ],
)
def test_ranks_that_do_not_add_up_are_seen(fault: LoadFault, text: str, signature: str) -> None:
    verdict = became(Question.SHARDED, text, fault)
    assert (verdict.outcome, verdict.signature) == (Outcome.NOT_IDENTICAL, signature)


@pytest.mark.parametrize("case", [case for case in cut_cases() if load_shards.runs(case, LANE)], ids=lambda case: str(case.id))
def test_cut_groups_refused_or_answered_are_not_accused(case: MoECase) -> None:
    verdict = became(Bad.CUT_GROUP, case.id)
    assert verdict.outcome is Outcome.PASS, verdict.detail


@pytest.mark.parametrize(
    ("fault", "text", "signature"),
    [
        (LoadFault.CUT_GROUP_STRETCHED, WORDS, "WRONG"),
        (LoadFault.NOTHING_NAMED, WORDS, "UNNAMED:AssertionError"),
        (LoadFault.ANYTHING_ACCEPTED, NVFP4, "ACCEPTED"),
    ],
)
def test_cut_groups_passed_over_are_seen(fault: LoadFault, text: str, signature: str) -> None:
    verdict = became(Bad.CUT_GROUP, text, fault)
    assert (verdict.outcome, verdict.signature) == (Outcome.NOT_IDENTICAL, signature)
    assert verdict.detail
