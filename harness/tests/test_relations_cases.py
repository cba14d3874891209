"""The lattices of the smoke level: sizes at which kernels branch, scales no two of which may be exchanged, and what has no answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import pytest
import torch

from cases.axes import InvalidCase
from cases.case import Entry, Level, MoECase
from cases.lattice_pairs import Pair, lattice_pairs
from cases.lattice_proof import prove
from harness import expected
from harness.backends import Backend, declared_refusal
from harness.exact import evaluate, inputs_of
from harness.relations import Relation, asked, unprovable
from harness.relations_check import Setting
from references.formats import round_to
from references.loading import LoadedExpert
from references.vocabulary import Format

LANE = Backend.INTERPRETER
SMOKE = [pair for pair in lattice_pairs(Level.SMOKE) if declared_refusal(*pair, LANE) is None]
TILE = 16  # the smallest tile of fused_moe.py in any dimension; the others are its multiples
SCALES = ("a1", "a2", "w13", "w2")


def naive(case: MoECase) -> bool:
    """fused_moe.py ``_prepare_expert_assignment``: one block for each token and expert, no sorting."""
    return case.tokens * case.top_k * 4 <= case.experts


@pytest.mark.parametrize("fmt", ["int8", "e4m3fn", "unquantized"])
@pytest.mark.parametrize(
    ("what", "holds"),
    [
        ("M is no multiple of a tile", lambda case: case.tokens % TILE != 0),
        ("N and K of GEMM 1 are no multiples of a 64 tile", lambda case: case.hidden % 64 and case.w13_rows % 64),
        ("N and K of GEMM 2 are no multiples of a 64 tile", lambda case: case.hidden % 64 and case.intermediate % 64),
        ("naive assignment of blocks", naive),
        ("sorted and padded assignment of blocks", lambda case: not naive(case)),
        ("more experts than one per token", lambda case: case.top_k > 1),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_every_format_meets_every_branch_on_sizes(fmt: str, what: str, holds: Callable[[MoECase], bool]) -> None:
    assert [case.id for case, _ in SMOKE if (case.weight if case.quantized else "unquantized") == fmt and holds(case)], what


@pytest.mark.parametrize(
    ("what", "holds"),
    [
        ("one token", lambda case: case.tokens == 1),
        ("one expert", lambda case: case.experts == 1),
        ("k = E > 1", lambda case: case.top_k == case.experts > 1),
        ("more tokens than a block of rows", lambda case: case.tokens > 2 * TILE),
        ("several blocks of scales in both directions of w13 and of w2", lambda case: min(case.hidden, case.intermediate) > 128),
        ("biases", lambda case: case.bias),
        ("router weight on the input", lambda case: case.router_weight_on_input),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_lattice_of_each_kind_is_there(what: str, holds: Callable[[MoECase], bool]) -> None:
    assert [case.id for case, _ in SMOKE if holds(case)], what


def test_a_batch_leaves_naive_assignment_when_every_token_is_there_several_times() -> None:
    crossing = [pair for pair in SMOKE if naive(pair[0])]
    assert crossing
    assert all(Relation.MULTIPLIED_TOKENS in asked(*pair, LANE) for pair in crossing)


@pytest.mark.parametrize("place", [pair for pair in SMOKE if pair[0].static_input], ids=lambda place: f"{place[0].id}[{place[1]}]")
def test_any_of_the_four_scales_in_another_s_place_is_seen(place: Pair) -> None:
    start = Setting.of(*place, LANE)
    assert start.proof is not None
    inputs = inputs_of(start)
    for used, due in permutations(SCALES, 2):
        confused = replace(inputs, loaded=tuple(_confused(expert, used, due) for expert in inputs.loaded))
        output = round_to(evaluate(confused).sum(1), start.recipe.output)
        assert not torch.equal(output, start.proof.output.double()), f"{used} in the place of {due}"


@pytest.mark.parametrize("place", [pair for pair in SMOKE if pair[0].quantized], ids=lambda place: f"{place[0].id}[{place[1]}]")
def test_scales_of_w13_and_w2_in_each_other_s_place_are_seen(place: Pair) -> None:
    start = Setting.of(*place, LANE)
    inputs = inputs_of(start)
    right = round_to(evaluate(inputs).sum(1), start.recipe.output)
    for used, due in permutations(("w13", "w2")):
        confused = replace(inputs, loaded=tuple(_confused(expert, used, due) for expert in inputs.loaded))
        assert not torch.equal(round_to(evaluate(confused).sum(1), start.recipe.output), right), f"{used} in the place of {due}"


def _confused(expert: LoadedExpert, used: str, due: str) -> LoadedExpert:
    """The expert with one scale where another is due, as an epilogue would multiply it: codes stay what they are."""
    wrong, of_first = _value(expert, used), due in ("a1", "w13")
    matrix = expert.w13 if of_first else expert.w2
    assert matrix.scale is not None
    scale = torch.full_like(matrix.scale, wrong) if due in ("w13", "w2") else matrix.scale * wrong / _value(expert, due)
    confused = replace(matrix, scale=scale)
    return replace(expert, w13=confused) if of_first else replace(expert, w2=confused)


def _value(expert: LoadedExpert, name: str) -> float:
    if name in ("w13", "w2"):
        scale = getattr(expert, name).scale
        return float(scale[0, 0])
    return float(getattr(expert, f"{name}_scale"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fp32-none-none-plain-gelu-fp32-e4k1m3h64i32-balanced-lattice", "erf and tanh"),
        ("int8-channel-dyntensor-quark-relu2_no_mul-fp32-e8k1m2h192i96-balanced-bias-norenorm-onin-lattice", "no square that fp32 holds"),
    ],
)
def test_what_is_said_to_have_no_single_answer_has_none(text: str, reason: str) -> None:
    case = MoECase.from_id(text)
    start = Setting.of(case, Entry.FUSED_EXPERTS, LANE)
    assert reason in (unprovable(case, start.recipe) or "")
    assert start.proof is None
    with pytest.raises(InvalidCase, match="not exact"):
        prove(expected.experts(case, start.checkpoint), start.batch.hidden_states, start.routing, case.activation, start.recipe)


def test_what_else_is_asked_where_there_is_no_single_answer() -> None:
    """Relations between two outputs: they need no reference."""
    without = [pair for pair in SMOKE if unprovable(pair[0], Setting.of(*pair, LANE).recipe) is not None]
    assert without
    for pair in without:
        assert pair[0].dtype is Format.FP32
        assert {Relation.REPEATED, Relation.DOWN_DOUBLES, Relation.DOWN_SCALE, Relation.PERMUTED_EXPERTS} <= set(asked(*pair, LANE))
