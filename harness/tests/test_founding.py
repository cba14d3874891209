from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from cases.axes import InvalidCase
from cases.case import Entry, MoECase
from harness.backends import Backend
from harness.compare import show
from harness.faults import Fault
from harness.founding import CASES, OPPOSITE, Standing, render, rows, wrong
from harness.relations_check import Setting
from harness.subject.fake import FakeSubject

LANE = Backend.INTERPRETER
RELU2 = CASES[0]


def standings(text: str, fault: Fault | None) -> set[Standing]:
    return {row.standing for row in rows(text, FakeSubject(fault))}


@pytest.mark.parametrize("text", [*CASES, *OPPOSITE])
def test_an_honest_kernel_is_correct_in_every_row(text: str) -> None:
    assert standings(text, None) == {Standing.CORRECT}


@pytest.mark.parametrize("text", CASES)
def test_the_fault_is_predicted_to_the_bit_in_every_row(text: str) -> None:
    assert standings(text, Fault.W_SCALE_FLAT_INDEX) == {Standing.FLAT_INDEX}


@pytest.mark.parametrize("fault", [Fault.W2_SCALE_FLAT_INDEX, Fault.W13_SCALE_FLAT_INDEX, Fault.W2_CHANNEL_ROLLED])
def test_another_fault_is_not_taken_for_it(fault: Fault) -> None:
    assert standings(RELU2, fault) == {Standing.NEITHER}


def test_every_expert_s_scales_and_every_flat_element_have_a_row_for_each_buffer() -> None:
    found = list(rows(RELU2, FakeSubject(Fault.W_SCALE_FLAT_INDEX)))
    changes = [
        f"{name}.weight_scale{at} of expert {e} times 2" for name in ("up_proj", "down_proj") for e, at in [(e, "") for e in range(4)]
    ]
    changes += [f"{name}.weight_scale[{e}] of expert 0 times 2" for name in ("up_proj", "down_proj") for e in range(4)]
    assert [row.change for row in found] == ["nothing", *changes]
    by_change = {row.change: row for row in found}
    element = by_change["down_proj.weight_scale[3] of expert 0 times 2"]
    assert element.moved.startswith("the tokens of expert 3, all channels")
    assert "w2_scale.flatten()[3] = " in element.used
    last = by_change["down_proj.weight_scale of expert 3 times 2"]
    assert (last.predicted[:23], last.moved) == ("the tokens of expert 3,", "nothing")


def test_the_table_states_expected_and_actual_to_the_bit_and_the_element_used() -> None:
    start = Setting.of(MoECase.from_id(RELU2), Entry.FUSED_EXPERTS, LANE)
    assert start.proof is not None
    actual = wrong(start)
    token, channel = (int(i) for i in (start.proof.output != actual).nonzero()[0])
    expert = int(start.routing.topk_ids[token, 0])
    scales = torch.stack([start.checkpoint.tensors[f"{e}.down_proj.weight_scale"].flatten() for e in range(4)])
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(render(list(rows(RELU2, FakeSubject(Fault.W_SCALE_FLAT_INDEX)))))
    text = " ".join(console.export_text().split())
    assert f"expected {show(start.proof.output[token, channel])}, actual {show(actual[token, channel])}" in text
    used, wanted = scales.flatten()[expert], scales[expert, channel]
    assert f"w2_scale.flatten()[{expert}] = {show(used)}, not w2_scale[{expert}, {channel}, 0] = {show(wanted)}" in text
    assert "(0x3" in show(used)


def test_wrong_values_that_are_not_known_to_the_bit_are_refused() -> None:
    case = MoECase.from_id("int8-channel-static-raw-gelu-fp32-e4k1m8h64i32-balanced-lattice")
    with pytest.raises(InvalidCase, match="W_SCALE_FLAT_INDEX can give more than one number"):
        wrong(Setting.of(case, Entry.FUSED_EXPERTS, LANE))
