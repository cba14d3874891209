"""What references/products.py and enclosure.py do to the rows of several experts, with the rows of one."""

from __future__ import annotations

from dataclasses import replace

from references import accumulators, enclosure, products
from references.accumulators import Slices
from references.bounds import Interval
from references.loading import Matrix, stacked
from references.products import Operand, Routed
from references.vocabulary import Accumulator, Recipe


def _all(rows: Operand) -> Routed:
    return Routed.of([rows.middle.shape[0]])


def _one(w: Operand) -> Operand:
    radius, lowest = (None if each is None else each.unsqueeze(0) for each in (w.radius, w.lowest))
    return replace(w, middle=w.middle.unsqueeze(0), radius=radius, magnitude=w.magnitude.unsqueeze(0), lowest=lowest)


def matmul(a: Operand, w: Operand, accumulator: Accumulator) -> Interval:
    return products.matmul(a, _one(w), accumulator, _all(a))


def slices(a: Operand, w: Operand) -> Slices | None:
    return accumulators.slices(a, _one(w), _all(a))


def gemm(rows: Operand, matrix: Matrix, accumulator: Accumulator) -> Interval:
    alone = stacked([matrix])
    return enclosure.gemm(rows, None, enclosure.read(alone, accumulator), alone, accumulator, _all(rows))


def finished(x: Interval, matrix: Matrix, recipe: Recipe) -> Interval:
    return enclosure._finished(enclosure._results(x, recipe), stacked([matrix]), recipe, Routed.of([x.low.shape[0]]))


def finished_in_slices(x: Interval, divided: Slices, bare: Matrix, matrix: Matrix, recipe: Recipe) -> Interval:
    routed = Routed.of([x.low.shape[0]])
    return enclosure._finished_in_slices(x, divided, None, stacked([bare]), stacked([matrix]), recipe, routed)
