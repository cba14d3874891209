"""A second proof, in rational numbers, of one lattice of every format, layout and way of quantizing activations."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from cases.case import Entry, Level, MoECase
from cases.lattice_pairs import Pair, lattice_pairs
from cases.perturb import Spot
from harness.backends import Backend, declared_refusal
from harness.relations import unprovable
from harness.relations_check import Setting
from harness.relations_scales import changed
from harness.tests.rationals import Inexact, evaluate, matrix, rounded
from references.formats import round_to
from references.vocabulary import Format

LANE = Backend.INTERPRETER
MOST = 3_000_000  # products of a case


def kind(setting: Setting) -> tuple[object, ...]:
    """What is quantized how; unquantized layers are one kind for each dtype."""
    case, how = setting.case, setting.recipe
    return case.weight, case.weight_scale, case.act_scale, case.origin, how.a1 is None, how.weight_quant is None


def smallest() -> dict[tuple[object, ...], Setting]:
    found: dict[tuple[object, ...], Setting] = {}
    for pair in sorted(lattice_pairs(Level.SMOKE), key=products):
        if declared_refusal(*pair, LANE) is None:
            setting = Setting.of(*pair, LANE)
            if unprovable(setting.case, setting.recipe) is None:
                found.setdefault(kind(setting), setting)
    return found


def products(pair: Pair) -> int:
    case = pair[0]
    return case.tokens * case.top_k * (case.w13_rows + case.intermediate) * case.hidden


SETTINGS = smallest()


@pytest.mark.parametrize("start", SETTINGS.values(), ids=lambda start: f"{start.case.id}[{start.entry}]")
def test_rational_numbers_give_the_proven_output(start: Setting) -> None:
    assert products((start.case, start.entry)) < MOST
    found = evaluate(start.case, start.entry, start.checkpoint, start.batch, start.recipe)
    assert start.proof is not None
    assert matrix(start.proof.output) == found


def test_every_format_layout_and_activation_quantizer_is_there() -> None:
    smoke = {
        (c.weight, c.weight_scale, c.act_scale, c.origin) for c, e in lattice_pairs(Level.SMOKE) if declared_refusal(c, e, LANE) is None
    }
    assert {what[:4] for what in SETTINGS} == smoke
    assert len(SETTINGS) >= 20


@pytest.mark.parametrize("fmt", [Format.FP32, Format.BF16, Format.FP16, Format.E4M3FN])
def test_rounding_is_the_format_s(fmt: Format) -> None:
    values = torch.cat([torch.linspace(-300, 300, 997, dtype=torch.float64), torch.logspace(-45, 2, 997, dtype=torch.float64)])
    assert [rounded(Fraction(x), fmt) for x in values.tolist()] == [Fraction(x) for x in round_to(values, fmt).tolist()]


def test_data_that_is_not_exact_is_refused() -> None:
    case = MoECase.from_id("int8-channel-dyntoken-ct-silu-bf16-e4k1m8h64i32-balanced-lattice")
    start = Setting.of(case, Entry.LAYER, LANE)
    start.batch.hidden_states[0] /= 16  # where silu is no longer known to the bit
    with pytest.raises(Inexact, match="silu of"):
        evaluate(case, Entry.LAYER, start.checkpoint, start.batch, start.recipe)


def test_one_scale_that_is_another_gives_another_output() -> None:
    start = next(
        setting for setting in SETTINGS.values() if setting.case.act_scale == "dyntoken" and setting.case.weight_scale == "channel"
    )
    there = changed(start, (Spot(expert=start.case.experts - 1, projection="down_proj", element=0), 0.5))
    found = evaluate(there.case, there.entry, there.checkpoint, there.batch, there.recipe)
    assert start.proof is not None
    assert there.proof is not None
    assert matrix(start.proof.output) != found == matrix(there.proof.output)
