"""A lattice pair in rational numbers: no floating point, nothing of references/ but its vocabulary, and every partial sum shown to fit.

Where a step rounds, it is one operation of a named format, rounded half to even here; where it could depend on an order, it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from operator import mul, or_

import torch

from cases.batch import Batch
from cases.case import Entry, MoECase
from cases.checkpoint import Checkpoint
from references.vocabulary import Activation, ActQuant, Format, Layout, Quotient, Recipe, Rounding, RouterWeight, W13Merge, WeightQuant

Row = list[Fraction]
_BITS = {Format.FP32: (24, -126), Format.BF16: (8, -126), Format.FP16: (11, -14), Format.E4M3FN: (4, -6)}
_QMAX = {Format.INT8: 127, Format.E4M3FN: 448}
_FITS = 2**24  # multiples of one unit below this are fp32 numbers, whatever is added first


class Inexact(AssertionError):
    """A step that could give more than one number."""


def rounded(x: Fraction, fmt: Format) -> Fraction:
    """Half to even, subnormals included."""
    if x == 0:
        return x
    bits, smallest = _BITS[fmt]
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, smallest) - bits + 1)
    return round(x / unit) * unit


def fractions(tensor: torch.Tensor) -> Row:
    return [Fraction(value) for value in tensor.float().flatten().tolist()]


def matrix(tensor: torch.Tensor) -> list[Row]:
    return [fractions(row) for row in tensor]


@dataclass(frozen=True)
class Weights:
    """codes [N][K], scale of each (row, block of columns) and bias of each row."""

    codes: list[Row]
    scale: list[Row]
    bias: Row


def _divided(x: Fraction, scale: Fraction, amax: Fraction, qmax: int, how: Quotient, fmt: Format) -> Fraction:
    if how is Quotient.AMAX_RATIO:
        return rounded(x * rounded(qmax / amax, fmt), fmt)
    return rounded(x * rounded(1 / scale, fmt), fmt) if how is Quotient.RECIPROCAL else rounded(x / scale, fmt)


def _code(ratio: Fraction, fmt: Format, rounding: Rounding) -> Fraction:
    if fmt is Format.E4M3FN:
        return rounded(max(Fraction(-448), min(Fraction(448), ratio)), fmt)
    match rounding:
        case Rounding.HALF_EVEN:
            whole = round(ratio)
        case Rounding.TOWARD_ZERO:
            whole = int(ratio)
        case Rounding.HALF_AWAY:
            whole = int(abs(ratio) + Fraction(1, 2)) * (1 if ratio > 0 else -1)
    return Fraction(max(-128, min(127, whole)))


def quantized(rows: list[Row], how: ActQuant | None, static: Fraction | None) -> tuple[list[Row], list[Row]]:
    """Codes, and scales by row and group."""
    if how is None:
        return rows, [[Fraction(1)] for _ in rows]
    qmax = _QMAX[how.format]
    whole = max(abs(x) for row in rows for x in row)
    codes, scales = [], []
    for row in rows:
        width = 128 if how.layout is Layout.GROUP128 else len(row)
        out, kept = [], []
        for start in range(0, len(row), width):
            part = row[start : start + width]
            amax = whole if how.layout is Layout.TENSOR else max(map(abs, part))
            scale = static if static is not None else rounded(amax / qmax, how.scale_store)
            kept.append(max(scale, rounded(Fraction(how.scale_floor), Format.FP32)))
            out += [_code(_divided(x, kept[-1], amax, qmax, how.quotient, Format.FP32), how.format, how.rounding) if x else x for x in part]
        codes.append(out)
        scales.append(kept)
    return codes, scales


def _read(case: MoECase, tensors: dict[str, torch.Tensor], name: str) -> Weights:
    codes = matrix(tensors[f"{name}.weight"])
    stored = tensors.get(f"{name}.weight_scale", tensors.get(f"{name}.weight_scale_inv"))
    if stored is None:
        scale = [[Fraction(1)] for _ in codes]
    elif case.weight_scale is Layout.BLOCK128:
        blocks = matrix(stored)
        scale = [blocks[row // 128] for row in range(len(codes))]
    else:
        flat = fractions(stored)
        scale = [[flat[row if len(flat) > 1 else 0]] for row in range(len(codes))]
    return Weights(codes, scale, fractions(tensors[f"{name}.bias"]) if case.bias else [Fraction(0)] * len(codes))


def _online(weights: Weights, how: WeightQuant) -> Weights:
    rows, qmax = weights.codes, _QMAX[how.format]
    size = len(rows) if how.layout is Layout.TENSOR else 1 if how.layout is Layout.CHANNEL else 128
    width = 128 if how.layout is Layout.BLOCK128 else len(rows[0])
    codes, scales = [list(row) for row in rows], [[Fraction(0)] * -(-len(rows[0]) // width) for _ in rows]
    for top in range(0, len(rows), size):
        for g, left in enumerate(range(0, len(rows[0]), width)):
            amax = max(abs(x) for row in rows[top : top + size] for x in row[left : left + width])
            scale = max(rounded(amax / qmax, how.arithmetic), rounded(Fraction(how.scale_floor), Format.FP32))
            for i in range(top, min(top + size, len(rows))):
                scales[i][g] = scale
                part = codes[i][left : left + width]
                codes[i][left : left + width] = [
                    _code(_divided(x, scale, amax, qmax, how.quotient, how.arithmetic), how.format, how.rounding) if x else x for x in part
                ]
    return Weights(codes, scales, weights.bias)


def _requantized(half: Weights, largest: Fraction, fmt: Format) -> Weights:
    codes = [
        [_code(rounded(code * scale[0], Format.FP16) / largest, fmt, Rounding.HALF_EVEN) for code in row]
        for row, scale in zip(half.codes, half.scale, strict=True)
    ]
    return Weights(codes, [[largest] for _ in codes], half.bias)


def loaded(case: MoECase, checkpoint: Checkpoint, recipe: Recipe, expert: int) -> tuple[Weights, Weights]:
    """w13 (gate rows first) and w2 as loading leaves them."""
    parts = [_read(case, checkpoint.tensors, f"{expert}.{name}") for name in case.projections]
    halves, down = parts[:-1], parts[-1]
    if recipe.weight_quant is not None:
        down = _online(down, recipe.weight_quant)
        if recipe.weight_quant.layout is not Layout.TENSOR:
            halves = [_online(half, recipe.weight_quant) for half in halves]
    elif recipe.w13_merge is W13Merge.REQUANTIZE_TO_MAX:
        largest = max(half.scale[0][0] for half in halves)
        halves = [_requantized(half, largest, case.weight) for half in halves]
    w13 = Weights(*([x for half in halves for x in getattr(half, field)] for field in ("codes", "scale", "bias")))
    if recipe.weight_quant is not None and recipe.weight_quant.layout is Layout.TENSOR:
        w13 = _online(w13, recipe.weight_quant)
    return w13, down


def _integers(row: Sequence[Fraction]) -> tuple[list[int], int]:
    denominator = max(x.denominator for x in row)
    if denominator & (denominator - 1):
        raise Inexact("an operand is no dyadic number")
    return [x.numerator * (denominator // x.denominator) for x in row], denominator


def _dot(a: Sequence[Fraction], w: Sequence[Fraction]) -> Fraction:
    """The sum of products, which no order of additions rounds."""
    left, below = _integers(a)
    right, beneath = _integers(w)
    terms = list(map(mul, left, right))
    held = reduce(or_, map(abs, terms), 0)
    if held and sum(map(abs, terms)) // (held & -held) >= _FITS:
        raise Inexact("a partial sum may need more than 24 bits")
    return Fraction(sum(terms), below * beneath)


def _gemm(codes: Row, a_scale: Row, weights: Weights, router: Fraction | None, recipe: Recipe) -> Row:
    out = []
    for w, w_scale, bias in zip(weights.codes, weights.scale, weights.bias, strict=True):
        if len(a_scale) == len(w_scale) == 1:
            total = rounded(rounded(_dot(codes, w) * a_scale[0], Format.FP32) * w_scale[0], Format.FP32)
        else:
            blocks = range(0, len(codes), 128)
            parts = [
                _dot(codes[at : at + 128], w[at : at + 128]) * a_scale[i % len(a_scale)] * w_scale[i % len(w_scale)]
                for i, at in enumerate(blocks)
            ]
            if any(rounded(part, Format.FP32) != part for part in parts):
                raise Inexact("a block's sum is rounded")
            total = _dot(parts, [Fraction(1)] * len(parts))
        total = rounded(total + bias, Format.FP32)
        total = total if router is None else rounded(total * router, Format.FP32)
        out.append(reduce(rounded, recipe.compute, total))
    return out


def _activated(g: Fraction, activation: Activation, store: Format) -> Fraction:
    if activation is Activation.RELU2_NO_MUL:
        return rounded(max(g, Fraction(0)) ** 2, store)
    silu = activation in (Activation.SILU, Activation.SILU_NO_MUL)
    if not silu and store is Format.FP32:
        raise Inexact("erf and tanh near 1, in fp32")
    if g == 0 or g <= (-110 if silu else -36):  # below half the smallest fp32 number
        return Fraction(0)
    if g < (18 if silu else 8):  # exp(-18) < 2**-25, and 1 - erf(8 / sqrt 2) < 2**-12
        raise Inexact(f"{activation} of {float(g)}")
    return rounded(g, store)


def evaluate(case: MoECase, entry: Entry, checkpoint: Checkpoint, batch: Batch, recipe: Recipe) -> list[Row]:
    """[M][H]: the one result. Raises Inexact."""
    assert batch.topk_ids is not None
    assert batch.topk_weights is not None
    ids = batch.topk_ids.tolist()
    weights = matrix(batch.topk_weights) if entry is Entry.FUSED_EXPERTS else [[Fraction(1, case.top_k)] * case.top_k] * case.tokens
    hidden = matrix(batch.hidden_states)
    if recipe.router_weight is RouterWeight.INPUT:
        hidden = [[rounded(x * w[0], case.dtype) for x in row] for row, w in zip(hidden, weights, strict=True)]
    static: list[Fraction | None] = [None, None]
    if case.static_input:
        scales = {
            name: max(fractions(checkpoint.tensors[f"{e}.{name}.input_scale"])[0] for e in range(case.experts)) for name in case.projections
        }
        static = [max(scale for name, scale in scales.items() if name != "down_proj"), scales["down_proj"]]
    experts = {e: loaded(case, checkpoint, recipe, e) for e in {e for row in ids for e in row}}
    codes, a1 = quantized(hidden, recipe.a1, static[0])
    middle = []
    for token, slot in ((t, s) for t in range(case.tokens) for s in range(case.top_k)):
        router = weights[token][slot] if recipe.router_weight is RouterWeight.GEMM1 else None
        sums = _gemm(codes[token], a1[token], experts[ids[token][slot]][0], router, recipe)
        acted = [_activated(g, case.activation, recipe.gate_store or recipe.activation_store) for g in sums[: case.intermediate]]
        if case.activation.gated:
            acted = [rounded(g * u, recipe.activation_store) for g, u in zip(acted, sums[case.intermediate :], strict=True)]
        middle.append(acted)
    codes, a2 = quantized(middle, recipe.a2, static[1])
    out = []
    for token in range(case.tokens):
        total = [Fraction(0)] * case.hidden
        for slot in range(case.top_k):
            router = weights[token][slot] if recipe.router_weight is RouterWeight.GEMM2 else None
            row = token * case.top_k + slot
            added = _gemm(codes[row], a2[row], experts[ids[token][slot]][1], router, recipe)
            total = [rounded(a + b, Format.FP32) for a, b in zip(total, added, strict=True)]
        out.append([rounded(x, recipe.output) for x in total])
    return out
