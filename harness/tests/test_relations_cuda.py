"""The lattices on the Triton lane of a Hopper GPU, whose FP8 tensor cores keep 14 bits of a sum. The reference needs no GPU."""

from __future__ import annotations

import pytest

from cases.axes import InvalidCase, Level
from cases.case import Entry, MoECase
from cases.lattice_pairs import lattice_pairs
from cases.lattice_proof import prove
from harness import expected, recipes, refusals
from harness.backends import Backend, declared_refusal
from harness.relations import Place, unprovable
from harness.relations_check import Setting
from references.vocabulary import Accumulator, Format


@pytest.fixture(autouse=True, params=[True, False], ids=["DeepGEMM installed", "without DeepGEMM"])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (recipes, refusals):
        monkeypatch.setattr(module, "ue8m0_scales", lambda: request.param)


def test_a_lattice_that_is_not_said_to_be_unprovable_is_proved() -> None:
    proved = 0
    for case, entry in lattice_pairs(Level.SMOKE):
        start = Setting.of(case, entry, Backend.TRITON)
        if declared_refusal(case, entry, Backend.TRITON) is None and unprovable(case, start.recipe) is None:
            assert start.proof is not None
            proved += case.weight is Format.E4M3FN
    assert proved


def test_fourteen_bits_are_too_few_for_some() -> None:
    text = "e4m3fn-channel-dyntoken-quark-gelu_tanh-fp16-e2k1m1h96i80-balanced-lattice"
    place = Place.of(MoECase.from_id(text), Entry.LAYER, Backend.TRITON)
    assert place.recipe.accumulator is Accumulator.TENSOR_CORE_FP8
    assert unprovable(place.case, place.recipe) is not None
    start = Setting.of(*place[:3])
    with pytest.raises(InvalidCase, match="not exact"):
        prove(expected.experts(place.case, start.checkpoint), start.batch.hidden_states, start.routing, place.case.activation, place.recipe)
