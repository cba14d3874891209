from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from cases.axes import InvalidCase
from cases.case import Entry, MoECase
from cases.perturb import Spot, perturb
from harness.backends import Backend
from harness.exact import BUILDERS, Drive, evaluate, identify, inputs_of, run_relation, verdict
from harness.faults import Fault
from harness.inject import Inputs, changed, with_all
from harness.message import message
from harness.pairs import Pair
from harness.relations import EXEMPTIONS, Exemption, Place, Relation, asked, why_not
from harness.relations_check import Setting, Variant, check
from harness.subject.fake import FakeSubject
from harness.verdict import NOT_FINITE, Outcome
from references.answer import answer_of
from references.vocabulary import ActQuant

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


OVERFLOWS = "e4m3fn-channel-static-quark-gelu-fp16-e8k4m33h128i64-balanced-bias-lattice"


def test_a_fault_is_named_where_a_clamp_makes_numbers_of_its_nan() -> None:
    """Seen on an H200 and here: a scale that the flat index gives another expert overflows fp16, and FP8's clamp makes 448 of NaN."""
    third, faulty, _ = overflown()
    as_if_nan_stayed = replace(faulty, recipe=replace(faulty.recipe, a2=replace(a2_of(faulty), of_nan=None)))
    nowhere = ~torch.isfinite(evaluate(as_if_nan_stayed).sum(1))
    assert 0 < int(nowhere.sum()) < nowhere.numel() // 2
    answer = answer_of(faulty.loaded, faulty.hidden_states, faulty.routing, faulty.activation, faulty.recipe)
    for end in (answer.low, answer.high):
        assert identify(third, end.half()) == "W_SCALE_FLAT_INDEX@all"
    for other in (torch.nan, 1.0):
        assert identify(third, torch.where(nowhere, other, answer.low).half()) == ""


def test_no_element_of_a_fault_that_overflows_hides_another() -> None:
    third, _, output = overflown()
    assert identify(third, output) == "W_SCALE_FLAT_INDEX@all"
    for row, column in enumerate(output.abs().argmax(1)):
        moved = output.clone()
        moved[row, column] *= 1.01
        assert identify(third, moved) == "", row


@pytest.mark.parametrize(
    ("text", "fault", "name"),
    [
        (
            "e4m3fn-channel-dyntoken-ct-silu_no_mul-fp32-e8k4m33h64i32-balanced-lattice",
            Fault.W_SCALE_FLAT_INDEX,
            "W_SCALE_FLAT_INDEX@all",
        ),
        ("fp32-none-none-plain-gelu-fp32-e4k1m3h64i32-balanced-lattice", Fault.W13_TAIL_K_DROPPED, "W13_TAIL_K_DROPPED@all"),
    ],
)
def test_a_fault_that_leaves_the_lattice_is_named_inside_its_interval_and_only_there(text: str, fault: Fault, name: str) -> None:
    variant = Variant(change="", setting=setting(text, Entry.FUSED_EXPERTS))
    faulty = changed(fault, inputs_of(variant.setting))
    answer = answer_of(faulty.loaded, faulty.hidden_states, faulty.routing, faulty.activation, faulty.recipe)
    low, high = answer.low.float(), answer.high.float()
    assert int((low < high).sum()) > low.numel() // 2
    assert [identify(variant, end) for end in (low, high)] == [name, name]
    row, column = divmod(int((high - low).argmax()), low.shape[1])
    for end, away in ((low, -torch.inf), (high, torch.inf)):
        moved = end.clone()
        moved[row, column] = torch.nextafter(torch.nextafter(end[row, column], torch.tensor(away)), torch.tensor(away))
        assert identify(variant, moved) == ""


@pytest.mark.parametrize(
    "second",
    [
        Fault.BIAS_DROPPED,
        Fault.W2_TAIL_K_DROPPED,
        Fault.TOPK_SLOT_DROPPED,
        Fault.STALE_ROW,
        Fault.A1_A2_SWAPPED,
        Fault.ROUTER_WEIGHT_DROPPED,
        Fault.EXPERT_GAIN_1_008,
        Fault.CHANNEL_GAIN_1_05,
    ],
)
def test_a_second_fault_is_not_taken_for_one_that_overflows(second: Fault) -> None:
    third, _, output = overflown()
    both = with_all((Fault.W_SCALE_FLAT_INDEX, second), inputs_of(third.setting), evaluate).sum(1).half()
    assert not torch.equal(both, output)
    assert identify(third, both) == ""


def overflown() -> tuple[Variant, Inputs, torch.Tensor]:
    """A gate scale that the founding fault gives an expert whose results then overflow fp16; the faulty layer, and its output [M, H]."""
    third = list(BUILDERS[Relation.GATE_SCALE](setting(OVERFLOWS, Entry.FUSED_EXPERTS)))[2]
    faulty = changed(Fault.W_SCALE_FLAT_INDEX, inputs_of(third.setting))
    return third, faulty, evaluate(faulty).sum(1).half()


def a2_of(inputs: Inputs) -> ActQuant:
    assert inputs.recipe.a2 is not None
    return inputs.recipe.a2


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
