from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from cases.batch import Batch
from cases.case import Entry, MoECase, Origin
from cases.checkpoint import Checkpoint
from harness.backends import Backend
from harness.exact import Drive, verdict
from harness.faults import Fault, applicable
from harness.recipes import recipe
from harness.relations import Relation
from harness.relations_check import Setting
from harness.sensitivity_exact import RELATIONS, Pair, ask, pairs, render, unasked
from harness.subject import Loaded, Ran
from harness.subject.fake import FakeSubject
from harness.verdict import Outcome
from references.vocabulary import CheckpointFormat

LANE = Backend.INTERPRETER
CHANNEL = ("int8-channel-dyntoken-ct-silu-bf16-e4k1m8h64i32-balanced-lattice", Entry.LAYER)
ONLINE = ("e4m3fn-channel-dyntoken-online-silu-fp16-e4k2m8h64i32-balanced-lattice", Entry.LAYER)
BIASED = ("int8-channel-dyntoken-raw-silu-bf16-e5k3m3h96i80-balanced-bias-lattice", Entry.FUSED_EXPERTS)
ON_INPUT = ("int8-channel-dyntoken-ct-silu-bf16-e4k1m8h64i32-balanced-norenorm-onin-lattice", Entry.LAYER)
STATIC = ("int8-tensor-static-raw-silu-bf16-e4k1m8h64i32-balanced-lattice", Entry.FUSED_EXPERTS)


def pair(of: tuple[str, Entry]) -> Pair:
    return MoECase.from_id(of[0]), of[1]


class Sometimes(FakeSubject):
    """Honest, but for loads of cases that ``when`` says."""

    def __init__(self, when: Callable[[MoECase], bool]) -> None:
        super().__init__()
        self.when = when

    def run(self, loaded: Loaded, batch: Batch) -> Ran:
        ran = super().run(loaded, batch)
        return replace(ran, output=-ran.output) if self.when(loaded.handle.case) else ran  # type: ignore[attr-defined]


class Remembers(FakeSubject):
    """What was loaded before is still there after another layer was loaded."""

    last: Loaded | None = None

    def load(self, case: MoECase, entry: Entry, checkpoint: Checkpoint) -> Loaded:
        self.last = super().load(case, entry, checkpoint)
        return self.last

    def run(self, loaded: Loaded, batch: Batch) -> Ran:
        assert self.last is not None
        return super().run(self.last, batch)


class Unsteady(FakeSubject):
    """The last bit of one element changes from run to run."""

    runs = 0

    def run(self, loaded: Loaded, batch: Batch) -> Ran:
        ran = super().run(loaded, batch)
        self.runs += 1
        ran.output.view(torch.int16)[0, 0] ^= self.runs % 2
        return ran


@pytest.mark.parametrize("fault", Fault)
def test_a_fault_is_caught_by_an_exact_relation_or_the_table_says_why_none_can(fault: Fault) -> None:
    shows = [each for each in pairs(LANE) if applicable(fault, each[0], recipe(*each, LANE))]
    found = (seen for each in shows for seen in ask(each, LANE, (fault,), (Relation.REFERENCE, Relation.DOWN_SCALE)))
    caught = next((seen for seen in found if seen.caught), None)
    reasons = unasked(fault, LANE)
    assert (caught is None) == bool(reasons)
    assert all(reason.strip() for reason in reasons)


@pytest.mark.parametrize(
    ("relation", "fault", "of"),
    [
        (Relation.UNROUTED_SCALE, Fault.W2_SCALE_OF_NEIGHBOUR_EXPERT, CHANNEL),
        (Relation.DOWN_DOUBLES, Fault.W2_SCALE_NOT_APPLIED, CHANNEL),
        (Relation.DOWN_SCALE, Fault.W2_CHANNEL_ROLLED, CHANNEL),
        (Relation.UP_MULTIPLIES, Fault.GATE_SCALE_FOR_UP, CHANNEL),
        (Relation.UP_SCALE, Fault.W13_CHANNEL_ROLLED, CHANNEL),
        (Relation.GATE_SCALE, Fault.UP_SCALE_FOR_GATE, CHANNEL),
        (Relation.INPUT_SCALE, Fault.A1_A2_SWAPPED, STATIC),
        (Relation.PERMUTED_EXPERTS, Fault.LAST_EXPERT_DROPPED, CHANNEL),
        (Relation.PERMUTED_TOKENS, Fault.STALE_ROW, CHANNEL),
        (Relation.DROPPED_TOKENS, Fault.STALE_ROW, CHANNEL),
        (Relation.MULTIPLIED_TOKENS, Fault.STALE_ROW, CHANNEL),
        (Relation.WEIGHT_ON_INPUT, Fault.ROUTER_WEIGHT_TWICE_ON_INPUT, ON_INPUT),
        (Relation.REFERENCE, Fault.W13_BIAS_DROPPED, BIASED),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_each_relation_has_been_seen_to_fail(relation: Relation, fault: Fault, of: tuple[str, Entry]) -> None:
    honest, faulty = ask(pair(of), LANE, (None, fault), (relation,))
    assert (honest.caught, faulty.caught) == (False, True)


@pytest.mark.parametrize(
    ("relation", "subject", "of"),
    [
        (Relation.OTHER_FORMAT, Sometimes(lambda case: case.checkpoint is CheckpointFormat.QUARK), CHANNEL),
        (Relation.ONLINE_AS_PREQUANTIZED, Sometimes(lambda case: case.origin is Origin.ONLINE), ONLINE),
        (Relation.REPEATED, Remembers(), CHANNEL),
        (Relation.REPEATED, Unsteady(), CHANNEL),
    ],
    ids=["other format", "online", "state left behind", "unsteady"],
)
def test_relations_between_loads_fail_where_loads_differ(relation: Relation, subject: FakeSubject, of: tuple[str, Entry]) -> None:
    start = Setting.of(*pair(of), LANE)
    assert verdict(relation, start, Drive(FakeSubject())).outcome is Outcome.PASS
    wanted = Outcome.NONDETERMINISTIC if relation is Relation.REPEATED else Outcome.NOT_IDENTICAL
    assert verdict(relation, start, Drive(subject)).outcome is wanted


def test_the_table_has_a_row_for_each_fault_and_says_why_some_have_none() -> None:
    found = ask(pair(CHANNEL), LANE, (None, Fault.STALE_ROW))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(found, LANE))
    text = console.export_text()
    assert all(any(line.startswith(f"{fault.name} ") for line in text.splitlines()) for fault in Fault)
    row = next(line.split() for line in text.splitlines() if line.startswith("STALE_ROW"))
    assert row[1:] == ["1/1", "0/1", "0/1", "1/1", "1/1", "1/1", "1/1", "1/1", "0/1", "1/1", "1/1", "1/1", "0/1", "1/1"]
    assert "RENORMALIZE_FLIPPED: none can, " in text


@pytest.mark.full
@pytest.mark.parametrize("shard", range(16))
def test_no_relation_accuses_an_honest_kernel(shard: int) -> None:
    seen = [each for one in pairs(LANE)[shard::16] for each in ask(one, LANE, (None,))]
    assert [each for each in seen if each.caught] == []
    assert {each.relation for each in seen} <= set(RELATIONS)
