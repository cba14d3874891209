from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from cases.axes import InvalidCase
from cases.case import Entry, MoECase
from cases.perturb import Spot, perturb
from harness import exact
from harness.backends import Backend
from harness.exact import BUILDERS, Drive, evaluate, identify, inputs_of, run_relation, verdict
from harness.faults import Fault
from harness.inject import contributions
from harness.message import message
from harness.pairs import Pair
from harness.relations import EXEMPTIONS, Exemption, Place, Relation, asked, why_not
from harness.relations_check import Setting, Variant, check
from harness.subject.fake import FakeSubject
from harness.verdict import NOT_FINITE, Outcome
from references.formats import round_to
from references.vocabulary import Format

CHANNEL = "int8-channel-static-raw-relu2_no_mul-bf16-e4k1m8h64i32-balanced-lattice"
PAIRS = (
    (CHANNEL, Entry.FUSED_EXPERTS),
    ("int8-channel-dyntoken-ct-silu-bf16-e4k1m8h64i32-balanced-lattice", Entry.LAYER),
    ("e4m3fn-tensor-static-ct-silu-bf16-e4k2m8h64i32-balanced-lattice", Entry.LAYER),
)


def setting(text: str, entry: Entry) -> Setting:
    return Setting.of(MoECase.from_id(text), entry, Backend.INTERPRETER)


@pytest.mark.parametrize(("text", "entry"), PAIRS)
def test_an_honest_kernel_keeps_every_relation(text: str, entry: Entry) -> None:
    start, drive = setting(text, entry), Drive(FakeSubject())
    for relation in asked(start.case, entry, Backend.INTERPRETER):
        assert verdict(relation, start, drive).outcome is Outcome.PASS, relation


@pytest.mark.parametrize("exemption", EXEMPTIONS, ids=lambda row: f"{row.relation}: {row.reason}")
def test_every_exemption_is_needed(exemption: Exemption) -> None:
    text, entry = exemption.shown_by
    start = setting(text, entry)
    assert exemption.when(Place.of(start.case, entry, Backend.INTERPRETER))
    assert why_not(exemption.relation, Place.of(start.case, entry, Backend.INTERPRETER)) is not None
    drive = Drive(FakeSubject())
    variants = list(BUILDERS[exemption.relation](replace(start, proven=False)))
    outcomes = [check(exemption.relation, v, drive.before(v, start), drive.after(v, start)) for v in variants]
    assert any(outcome is not None for outcome in outcomes)


def test_the_founding_fault_is_named_with_the_scale_that_was_used() -> None:
    start, drive = setting(CHANNEL, Entry.FUSED_EXPERTS), Drive(FakeSubject(Fault.W_SCALE_FLAT_INDEX))
    found = verdict(Relation.REFERENCE, start, drive)
    assert found.outcome is Outcome.NOT_IDENTICAL
    assert found.signature == "W_SCALE_FLAT_INDEX@all"
    assert "w2_scale.flatten()[" in found.detail
    assert "(0x" in found.detail


def test_no_fault_is_named_where_nothing_finite_is_left() -> None:
    start = setting("e4m3fn-channel-dyntensor-quark-silu-fp16-e5k2m3h96i80-balanced-lattice", Entry.FUSED_EXPERTS)
    assert verdict(Relation.REFERENCE, start, Drive(FakeSubject(Fault.W_SCALE_FLAT_INDEX))).signature == NOT_FINITE


def test_a_fault_is_named_where_a_clamp_makes_numbers_of_its_nan_and_only_there() -> None:
    """Seen on an H200 and here: a scale that the flat index gives another expert overflows fp16, and FP8's clamp takes the NaN away."""
    text = "e4m3fn-channel-static-quark-gelu-fp16-e8k4m33h128i64-balanced-bias-lattice"
    start = setting(text, Entry.FUSED_EXPERTS)
    third = list(BUILDERS[Relation.GATE_SCALE](start))[2]
    faulty = evaluate_faulty(third.setting)
    nowhere = ~torch.isfinite(faulty)
    assert 0 < int(nowhere.sum()) < nowhere.numel() // 2
    clamped = torch.where(nowhere, 1.0, faulty)
    assert identify(third, clamped.half()) == "W_SCALE_FLAT_INDEX@all"
    assert identify(third, torch.where(nowhere, torch.nan, faulty).half()) == "W_SCALE_FLAT_INDEX@all"
    (row, column), *_ = torch.nonzero(~nowhere & (faulty != 0)).tolist()
    clamped[row, column] *= 1.01
    assert identify(third, clamped.half()) == ""


def test_a_fault_is_not_named_where_most_has_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "e4m3fn-channel-static-quark-gelu-fp16-e8k4m33h128i64-balanced-bias-lattice"
    third = list(BUILDERS[Relation.GATE_SCALE](setting(text, Entry.FUSED_EXPERTS)))[2]
    faulty = evaluate_faulty(third.setting)
    clamped = torch.where(torch.isfinite(faulty), faulty, 1.0).half()
    share = float((~torch.isfinite(faulty)).double().mean())
    monkeypatch.setattr(exact, "_LOST", share)
    assert identify(third, clamped) == ""
    monkeypatch.setattr(exact, "_LOST", share * 1.01)
    assert identify(third, clamped) == "W_SCALE_FLAT_INDEX@all"


def evaluate_faulty(start: Setting) -> torch.Tensor:
    """[M, H] float64 as fp16 holds it, with the founding fault."""
    return round_to(contributions(Fault.W_SCALE_FLAT_INDEX, inputs_of(start), evaluate).sum(1), Format.FP16)


@pytest.mark.parametrize(
    ("relation", "fault", "at", "predicted", "moved"),
    [
        (Relation.DOWN_SCALE, Fault.W_SCALE_FLAT_INDEX, PAIRS[0], "the tokens of expert 3, all channels, by exactly 2", "nothing"),
        (Relation.UNROUTED_SCALE, Fault.W2_SCALE_OF_NEIGHBOUR_EXPERT, PAIRS[1], "nothing", "the tokens of expert "),
    ],
    ids=["not moved", "moved"],
)
def test_a_failure_says_what_should_have_moved_what_did_and_both_values_to_the_bit(
    relation: Relation, fault: Fault, at: tuple[str, Entry], predicted: str, moved: str
) -> None:
    pair = Pair(MoECase.from_id(at[0]), at[1])
    found = run_relation(relation, pair, Backend.INTERPRETER, Drive(FakeSubject(fault))).verdict
    text = message(found, pair=f"{relation}:{pair.id}", backend="interpreter", environment={}, again="moediff run")
    assert text.startswith(f"NOT_IDENTICAL  {relation}:{pair.id}")
    assert re.search(rf"predicted  {re.escape(predicted)}$", text, re.MULTILINE), text
    assert re.search(rf"moved      {moved}", text), text
    number = r"-?[\d.e-]+ \(0x[0-9a-f]{4}\)"
    assert re.search(rf"first      token \d+, channel \d+: expected {number}, actual {number}", text), text


def test_a_region_that_moved_and_should_not_have_is_said() -> None:
    start = setting(CHANNEL, Entry.FUSED_EXPERTS)
    before = torch.zeros(8, 64, dtype=torch.bfloat16)
    after = before.clone()
    after[3, 7] = 1.0
    broken = check(Relation.UNROUTED_SCALE, Variant(change="nothing", setting=start), before, after)
    assert broken is not None
    assert (broken.index, broken.differing) == ((3, 7), 1)
    assert "channels 7" in broken.moved
    assert broken.actual == "1 (0x3f80)"


def test_a_perturbation_is_a_power_of_two_of_a_scale_that_exists() -> None:
    start = setting(CHANNEL, Entry.FUSED_EXPERTS)
    spot = Spot(expert=3, projection="down_proj", element=1)
    after = perturb(start.case, start.checkpoint, spot, 2.0)
    name = "3.down_proj.weight_scale"
    changed = after.tensors[name] != start.checkpoint.tensors[name]
    assert changed.flatten().nonzero().flatten().tolist() == [1]
    assert all(after.tensors[n] is t for n, t in start.checkpoint.tensors.items() if n != name)
    with pytest.raises(InvalidCase, match="power of two"):
        perturb(start.case, start.checkpoint, spot, 3.0)
    with pytest.raises(InvalidCase, match="64 scales"):
        perturb(start.case, start.checkpoint, replace(spot, element=64), 2.0)
