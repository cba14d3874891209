from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import cache
from itertools import combinations, product

from cases.case import Entry, Level, MoECase
from cases.lattice_pairs import Pair, allowed, axes, case_of, doors, lattice_pairs
from harness.backends import Backend, declared_refusal
from harness.relations import Relation, asked

LANE = Backend.INTERPRETER
MOST = 4000  # relations of nightly: 0.3 s of a core each


def relations(pair: Pair) -> tuple[Relation, ...]:
    return () if declared_refusal(*pair, LANE) is not None else asked(*pair, LANE)


def kinds(pairs: Iterable[Pair]) -> set[tuple[Hashable, ...]]:
    """Relation x how weights are scaled x how activations are x format, checkpoint and entry."""
    return {kind(relation, *pair) for pair in pairs for relation in relations(pair)}


def kind(relation: Relation, case: MoECase, entry: Entry) -> tuple[Hashable, ...]:
    return relation, case.weight, case.weight_scale, case.act_scale, case.checkpoint, case.origin, entry


@cache
def every_row() -> tuple[tuple[Hashable, ...], ...]:
    """The full product of the axes."""
    rows = product(*axes())
    return tuple(row for row in rows if all(allowed(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)))


def test_nightly_holds_smoke_and_stays_sensible() -> None:
    smoke, nightly, deep = (set(lattice_pairs(level)) for level in Level)
    assert smoke < nightly <= deep
    assert sum(len(relations(pair)) for pair in nightly) <= MOST


def test_nightly_asks_each_relation_of_each_scheme_through_each_entry_that_it_exists_for() -> None:
    whole = kinds(pair for row in every_row() for pair in doors(case_of(row)))
    assert len(whole) > 500
    assert whole - kinds(lattice_pairs(Level.NIGHTLY)) == set()


def test_any_two_values_of_two_axes_meet_in_nightly() -> None:
    nightly = {case for case, _ in lattice_pairs(Level.NIGHTLY)}
    there = [row for row in every_row() if case_of(row) in nightly]
    for i, j in combinations(range(len(axes())), 2):
        exist = {(row[i], row[j]) for row in every_row() if any(doors(case_of(row)))}
        assert exist - {(row[i], row[j]) for row in there} == set()
