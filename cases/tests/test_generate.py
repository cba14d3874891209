from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Hashable

import pytest

from cases.case import ActScale, Entry, Level, MoECase, Origin, Routing, entry_takes
from cases.doors import closed
from cases.generate import SCHEMES, pairs
from cases.pairwise import NoRow, covering
from references.vocabulary import Activation, CheckpointFormat, Format, Layout

SMOKE = pairs(Level.SMOKE)


def test_levels_nest_and_have_their_size() -> None:
    smoke, nightly, deep = (set(pairs(level)) for level in Level)
    assert smoke < nightly < deep
    assert len(smoke) >= 400
    assert len(nightly) >= 1500


@pytest.mark.parametrize("level", list(Level))
def test_pairs_are_sorted_and_each_once(level: Level) -> None:
    found = [(case.id, entry) for case, entry in pairs(level)]
    assert found == sorted(set(found))
    assert all(entry_takes(case, entry) for case, entry in pairs(level))


@pytest.mark.parametrize("seed", ["0", "1"])
def test_every_process_collects_the_same_and_imports_no_torch(seed: str) -> None:
    script = (
        "import hashlib, sys; from cases.case import Level; from cases.generate import pairs;"
        "print(hashlib.sha256('\\n'.join(c.id + e for c, e in pairs(Level.NIGHTLY)).encode()).hexdigest(),"
        "sorted({'torch', 'vllm', 'triton', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    import hashlib

    here = hashlib.sha256("\n".join(case.id + entry for case, entry in pairs(Level.NIGHTLY)).encode()).hexdigest()
    assert done.stdout.split(maxsplit=1) == [here, "[]\n"]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("activation", list(Activation)),
        ("dtype", [Format.BF16, Format.FP16, Format.FP32]),
        ("act_scale", list(ActScale)),
        ("checkpoint", list(CheckpointFormat)),
        ("origin", list(Origin)),
        ("routing", list(Routing)),
        ("weight_scale", [Layout.NONE, Layout.TENSOR, Layout.CHANNEL, Layout.BLOCK128]),
        ("bias", [True, False]),
        ("renormalize", [True, False]),
        ("router_weight_on_input", [True, False]),
        ("tokens", [1, 2, 3, 17, 33, 129]),
        ("experts", [2, 3, 5, 8, 40, 60]),
    ],
)
def test_every_value_of_every_axis_is_in_smoke(field: str, values: list[object]) -> None:
    assert set(values) <= {getattr(case, field) for case, _ in SMOKE}


def schemes(entry: Entry) -> set[tuple[Format, Layout, ActScale]]:
    return {(case.weight, case.weight_scale, case.act_scale) for case, door in SMOKE if door is entry}


def test_int8_granularities_are_independent_axes_through_the_direct_entry() -> None:
    wanted = itertools.product((Layout.TENSOR, Layout.CHANNEL), (ActScale.STATIC_TENSOR, ActScale.DYNAMIC_TENSOR, ActScale.DYNAMIC_TOKEN))
    assert {(Format.INT8, weight, act) for weight, act in wanted} <= schemes(Entry.FUSED_EXPERTS)


@pytest.mark.parametrize("halves", [True, False])
def test_every_scheme_is_in_smoke_gated_and_not(halves: bool) -> None:
    found = {
        (None if case.origin is Origin.UNQUANTIZED else case.weight, case.weight_scale, case.act_scale, case.checkpoint, case.origin)
        for case, _ in SMOKE
        if case.activation.gated is halves
    }
    assert {tuple(scheme) for scheme in SCHEMES} <= found


def test_some_sizes_are_multiples_of_no_tile() -> None:
    assert any(case.hidden % 16 and case.intermediate % 16 for case, _ in SMOKE)
    assert any(case.tokens * case.top_k * 4 <= case.experts for case, _ in SMOKE)  # vLLM's assignment without sorting
    assert any(case.top_k == case.experts > 1 for case, _ in SMOKE)


def test_doors_that_are_shut_have_one_to_four_pairs_each() -> None:
    shut: dict[str, list[MoECase]] = {}
    for case, entry in SMOKE:
        if reason := closed(case, entry):
            shut.setdefault(reason, []).append(case)
    assert all(1 <= len(found) <= 4 for found in shut.values()), {reason: len(found) for reason, found in shut.items()}
    assert len(shut) == 8


def never(axis: int, value: Hashable, later: int, other: Hashable) -> bool:
    return not (axis == 0 and value == "a" and later == 1 and other == 1)


def test_covering_covers_every_allowed_pair() -> None:
    axes: list[list[Hashable]] = [["a", "b"], [1, 2], ["x", "y", "z"], [True, False]]
    rows = covering(axes, never)
    for (i, left), (j, right) in itertools.combinations(enumerate(axes), 2):
        for pair in itertools.product(left, right):
            assert any((row[i], row[j]) == pair for row in rows) is never(i, pair[0], j, pair[1])
    assert all(not (row[0] == "a" and row[1] == 1) for row in rows)


def test_covering_says_which_axis_has_no_value() -> None:
    nothing: Callable[[int, Hashable, int, Hashable], bool] = lambda axis, _value, later, _other: not (axis == 0 and later == 2)  # noqa: E731
    with pytest.raises(NoRow, match="axis 2 has no value"):
        covering([["a"], [1], ["x"]], nothing)
