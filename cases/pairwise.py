"""Covering arrays: every allowed pair of values of two axes appears in some row. Pure and deterministic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import combinations, product

Allowed = Callable[[int, Hashable, int, Hashable], bool]  # (axis, value, later axis, value)


class NoRow(ValueError):
    """The constraints leave no value for an axis; the message names the axis and what was already chosen."""


def covering(axes: Sequence[Sequence[Hashable]], allowed: Allowed) -> list[tuple[Hashable, ...]]:
    """Rows covering every allowed pair of values: all of axis 0 x axis 1, the other axes filled greedily.

    Constraints are between two values at a time. A pair the filling missed gets a row of its own at the end.

    Raises:
        NoRow: an allowed pair that no row can hold.
    """
    order = range(len(axes))
    covered: set[tuple[int, Hashable, int, Hashable]] = set()
    used: Counter[tuple[int, Hashable]] = Counter()

    def complete(chosen: dict[int, Hashable]) -> tuple[Hashable, ...]:
        for axis in order:
            if axis not in chosen:
                chosen[axis] = _best(axis, axes[axis], chosen)
        row = tuple(chosen[axis] for axis in order)
        used.update(enumerate(row))
        covered.update((i, row[i], j, row[j]) for i, j in combinations(order, 2))
        return row

    def _best(axis: int, values: Sequence[Hashable], chosen: dict[int, Hashable]) -> Hashable:
        best, best_score = None, (-1, 0)
        for value in values:
            pairs = [(i, v, axis, value) if i < axis else (axis, value, i, v) for i, v in chosen.items()]
            score = (sum(pair not in covered for pair in pairs), -used[axis, value])
            if score > best_score and all(allowed(*pair) for pair in pairs):
                best, best_score = value, score
        if best_score == (-1, 0):
            raise NoRow(f"axis {axis} has no value that goes with {chosen}")
        return best

    rows = [complete({0: a, 1: b}) for a, b in product(axes[0], axes[1]) if allowed(0, a, 1, b)]
    for i, j in combinations(order, 2):
        for a, b in product(axes[i], axes[j]):
            if allowed(i, a, j, b) and (i, a, j, b) not in covered:
                rows.append(complete({i: a, j: b}))
    return rows
