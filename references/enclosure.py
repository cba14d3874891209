"""The recipe on intervals: what every honest kernel's output must lie in. The steps of references/moe.py::forward, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from references.accumulators import Slices, slices, tf32
from references.bounds import (
    Interval,
    activation_interval,
    exactly,
    opened,
    quantize,
    router_weights,
    store,
    sum_over_slots,
    times,
)
from references.formats import limits, round_to
from references.gating import gated_interval, has_parameters
from references.loading import LoadedExpert, Matrix, stacked
from references.microscaling import nvfp4_hull
from references.moe import Routing, first_gemm, reads_tf32, scales_stored, static_rows
from references.products import Operand, Routed, matmul, operand, scaled
from references.vocabulary import Accumulator, Activation, ActQuant, Epilogue, Format, Recipe, RouterWeight, Swiglu

SCALES_OF_GEMM_2 = "activation scales of GEMM 2"  # in a trace
Trace = Callable[[str, Interval], None]  # told what each step made, by name, before the rounding that stores it


def _untraced(step: str, x: Interval) -> None:
    """Nobody is interested."""


def _store_through(x: Interval, formats: tuple[Format, ...]) -> Interval:
    for fmt in formats:
        x = store(x, fmt)
    return x


def _results(x: Interval, recipe: Recipe) -> Interval:
    share = recipe.stored_share
    if share == 1.0:
        return _store_through(x, recipe.compute)
    part = _store_through(x.ends(lambda end: end * share), recipe.compute)
    return store(part.ends(lambda end: end / share), recipe.compute[-1])


def gemm(
    codes: Operand,
    a_scale: Interval | None,
    weights: Operand,
    matrix: Matrix,
    accumulator: Accumulator,
    routed: Routed,
    tile: int | None = None,
) -> Interval:
    """The GEMM of every row's expert before bias and router weight, [R, N]: codes [R, K] against ``weights``, those of ``matrix``, stacked
    [E, N, K].

    One scale per row and per output channel: a single accumulation over K, then the scales. Scales per 128 columns
    (fused_moe.py, fused_moe_kernel: one dot per BLOCK_SIZE_K, times both scales, added to an fp32 accumulator, K ascending): the partial
    results of the groups, or of narrower tiles, each scaled, then added in order.
    """
    a_groups = 1 if a_scale is None else a_scale.low.shape[1]
    w_groups = 1 if matrix.scale is None else matrix.scale.shape[-1]
    step = matrix.width if tile is None else tile
    if max(a_groups, w_groups) == 1 and (tile is None or tile >= codes.middle.shape[-1]):
        w_scale = None if matrix.scale is None else routed.each(matrix.scale[..., 0])
        return scaled(matmul(codes, weights, accumulator, routed), a_scale, w_scale)
    total: Interval | None = None
    for start in range(0, codes.middle.shape[-1], step):
        g, columns = start // matrix.width, (..., slice(start, start + step))
        a_own = None if a_scale is None else a_scale[(slice(None), slice(g, g + 1) if a_groups > 1 else slice(0, 1))]
        w_own = None if matrix.scale is None else routed.each(matrix.scale[..., g if w_groups > 1 else 0])
        part = scaled(matmul(codes[columns], weights[columns], accumulator, routed), a_own, w_own)
        total = part if total is None else store(Interval(total.low + part.low, total.high + part.high), Format.FP32)
    assert total is not None
    return total


def read(matrix: Matrix, accumulator: Accumulator) -> Operand:
    """The codes of ``matrix`` as the GEMM multiplies them."""
    return operand(exactly(matrix.codes) if matrix.low is matrix.high else Interval(matrix.low, matrix.high), matrix.format, accumulator)


def _expert_gemms(
    rows: Interval,
    how: ActQuant | None,
    static_scale: torch.Tensor | None,
    matrix: Matrix,
    routed: Routed,
    weights: Interval | None,
    recipe: Recipe,
    trace: Trace,
    name: str,
) -> Interval:
    """All experts' GEMM over the routed rows [R, K] -> stored result [R, N]; matrix: stacked [E, N, K]."""
    codes, a_scale = _entering(rows, how, static_scale, routed)
    if how is None and reads_tf32(recipe):
        codes = codes.ends(tf32)
    trace(f"codes entering {name}", codes)
    if a_scale is not None:
        trace(f"activation scales of {name}", a_scale)
    trace(f"codes of weights in {name}, by expert in use", Interval(matrix.low, matrix.high))
    stored = recipe.output if how is None else how.store or how.format
    prepared = operand(codes, stored, recipe.accumulator)
    bare = replace(matrix, scale=None) if scales_stored(matrix, recipe) else matrix.multiplied_out()
    codes_read = read(bare, recipe.accumulator)
    x = gemm(prepared, a_scale, codes_read, bare, recipe.accumulator, routed, recipe.scaled_tile)
    trace(f"sums of {name}", x)
    in_fp32 = recipe.epilogue is Epilogue.FP32
    if matrix.bias is not None and in_fp32:
        bias = routed.each(matrix.bias)
        x = store(Interval(x.low + bias, x.high + bias), Format.FP32)
    if weights is not None:
        x = store(times(x, weights), Format.FP32)
    if in_fp32:
        trace(f"results of {name}, with bias and router weight", x)
        return _results(x, recipe)
    divided = None if recipe.split_store is None else slices(prepared, codes_read, routed)
    if divided is None:
        x = _finished(_results(x, recipe), matrix, recipe, routed)
    else:
        x = _finished_in_slices(x, divided, a_scale, bare, matrix, recipe, routed)
    trace(f"results of {name}, with bias and router weight", x)
    return x


def _entering(rows: Interval, how: ActQuant | None, static_scale: torch.Tensor | None, routed: Routed) -> tuple[Interval, Interval | None]:
    """Codes and scales; the values themselves and no scale where they are multiplied out."""
    if how is None:
        return rows, None
    if how.per_expert:
        return _entering_by_expert(rows, replace(how, per_expert=False), static_scale, routed)
    if not how.microscaled:
        return quantize(rows, how, static_scale)
    assert static_scale is not None
    return Interval(*nvfp4_hull(rows.low, rows.high, static_scale, how)), None


def _entering_by_expert(
    rows: Interval, how: ActQuant, static_scale: torch.Tensor | None, routed: Routed
) -> tuple[Interval, Interval | None]:
    quantized = [quantize(rows[mine], how, None if static_scale is None else static_scale[mine]) for mine in routed.spans]
    codes, scale = (
        Interval(torch.cat([each[which].low for each in quantized]), torch.cat([each[which].high for each in quantized]))
        for which in (0, 1)
    )
    return codes, scale


def _finished(x: Interval, matrix: Matrix, recipe: Recipe, routed: Routed) -> Interval:
    """What is done to a stored result, and stored again."""
    fmt = recipe.compute[-1]
    bias = None if matrix.bias is None else routed.each(round_to(matrix.bias, fmt))
    if recipe.epilogue is Epilogue.CHANNEL_STORED and matrix.scale is not None:
        scale = routed.each(matrix.scale[..., 0])
        x = Interval(x.low * scale + (0.0 if bias is None else bias), x.high * scale + (0.0 if bias is None else bias))
    elif scales_stored(matrix, recipe) and matrix.scale is not None:
        scale = routed.each(matrix.scale[..., 0])
        product, x = Interval(x.low * scale, x.high * scale), store(Interval(x.low * scale, x.high * scale), fmt)
        if bias is None:
            return x
        # PTX's mul.f16x2 and add.f16x2 name no rounding: ptxas may contract them into one fma
        twice, fused = (store(Interval(each.low + bias, each.high + bias), fmt) for each in (x, product))
        return Interval(torch.minimum(twice.low, fused.low), torch.maximum(twice.high, fused.high))
    elif bias is not None:
        x = Interval(x.low + bias, x.high + bias)
    else:
        return x
    return store(x, fmt)


def _finished_in_slices(
    x: Interval, divided: Slices, a_scale: Interval | None, bare: Matrix, matrix: Matrix, recipe: Recipe, routed: Routed
) -> Interval:
    """Each slice of K is stored, finished, and stored again, the first with the bias; then they are added in the stored format.

    x: the whole sum, with the scales of ``bare``. humming/epilogue/smem_writer.cuh and gmem_writer.cuh.
    """
    fmt = recipe.compute[-1]
    u, tiny = 2.0 ** -limits(fmt).significand_bits, limits(fmt).min_subnormal / 2.0
    channel = recipe.epilogue is Epilogue.CHANNEL_STORED and matrix.scale is not None
    scale = routed.each(matrix.scale[..., 0]) if channel and matrix.scale is not None else torch.ones(())
    bias = torch.zeros(()) if matrix.bias is None else routed.each(round_to(matrix.bias, fmt))
    parts, sums = divided.parts, divided.sums
    for factor in (None if a_scale is None else a_scale.high, None if bare.scale is None else routed.each(bare.scale[..., 0])):
        parts, sums = (parts, sums) if factor is None else (parts * factor, sums * factor)
    stored = (u * parts + tiny / recipe.stored_share * divided.blocks) * scale
    finished = u * (parts * scale + bias.abs()) + tiny * divided.blocks
    added = u * (sums * scale + bias.abs() * (divided.blocks - 1)) + tiny * (divided.blocks - 1)
    error = (stored + finished + added) * (1.0 + u) ** (divided.blocks + 2)  # each error passes through the roundings after it
    return store(Interval(x.low * scale + bias - error, x.high * scale + bias + error), fmt)


def _weighted(x: Interval, weights: Interval, per_expert: list[float], owner: torch.Tensor, recipe: Recipe) -> Interval:
    """A stored result times the router weight, itself stored, and a factor of the expert's in it."""
    factors = torch.tensor(per_expert, dtype=torch.float64)[owner].unsqueeze(1)
    given = weights if bool((factors == 1.0).all()) else store(Interval(weights.low * factors, weights.high * factors), Format.FP32)
    return store(times(x, store(given, recipe.output)), recipe.output)


def _activated(h13: Interval, activation: Activation, recipe: Recipe, trace: Trace) -> Interval:
    clamped = recipe.a2 is not None and recipe.a2.of_nan is not None
    if not activation.gated:
        act = activation_interval(activation, h13)
        trace("the activation", act)
        return store(opened(act, h13) if clamped else act, recipe.activation_store)
    half = h13.low.shape[1] // 2
    gate, up = (h13[:, :half], h13[:, half:])
    if has_parameters(activation, recipe.swiglu):
        product = gated_interval(activation, recipe.swiglu or Swiglu(), gate, up, recipe.gate_store)
        trace("gate times up", product)
        return store(opened(product) if clamped else product, recipe.activation_store)
    act = activation_interval(activation, gate)
    trace("the activation", act)
    act = store(act, recipe.gate_store or Format.FP32)
    product = store(times(act, up), Format.FP32)
    trace("gate times up", product)
    return store(opened(product, gate, act, up) if clamped else product, recipe.activation_store)


def enclose(
    loaded: tuple[LoadedExpert, ...],
    hidden_states: torch.Tensor,
    routing: Routing,
    activation: Activation,
    recipe: Recipe,
    trace: Trace = _untraced,
) -> Interval:
    """The layer's output on intervals, [M, H], before its last rounding to ``recipe.output``.

    hidden_states [M, H] in the hidden dtype, known exactly. trace: told each step's intervals, in order; (token, slot) rows expert by
    expert.
    """
    tokens, top_k = routing.topk_ids.shape
    order, owner = routing.rows.order, routing.rows.owner[routing.rows.order]  # (token, slot) rows, expert by expert
    routed = Routed.of([len(rows) for _, rows in routing.rows.parts])
    experts = [loaded[e] for e, _ in routing.rows.parts]
    weights = router_weights(routing.topk_weights, len(loaded), recipe.router_weight_exact or routing.exact)
    weights = weights if recipe.router_weight_store is None else store(weights, recipe.router_weight_store)
    trace("router weights", weights)
    flat = weights.ends(lambda end: end.reshape(-1, 1)[order])
    x = exactly(hidden_states.to(torch.float64)[order // top_k])
    if recipe.router_weight is RouterWeight.INPUT:
        x = store(times(x, store(flat, recipe.output)), recipe.output)
    places = (recipe.router_weight, recipe.router_weight_again)
    h13 = _expert_gemms(
        x,
        recipe.a1,
        static_rows([e.a1_scale for e in loaded], owner),
        stacked([e.w13 for e in experts]),
        routed,
        flat if RouterWeight.GEMM1 in places else None,
        first_gemm(recipe),
        trace,
        "GEMM 1",
    )
    if RouterWeight.FIRST_STORED in places:
        h13 = _weighted(h13, flat, [e.first_router_factor for e in loaded], owner, recipe)
    out = _expert_gemms(
        _activated(h13, activation, recipe, trace),
        recipe.a2,
        static_rows([e.a2_scale for e in loaded], owner),
        stacked([e.w2 for e in experts]),
        routed,
        flat if RouterWeight.GEMM2 in places else None,
        recipe,
        trace,
        "GEMM 2",
    )
    if RouterWeight.STORED in places:
        out = _weighted(out, flat, [e.router_factor for e in loaded], owner, recipe)
    if RouterWeight.SUM in places:
        out = store(times(out, flat), Format.FP32)  # the exact product too, where it is fused into the addition
    total = sum_over_slots(out.ends(lambda end: end[routing.rows.back].reshape(tokens, top_k, -1)), recipe.slots_store)
    trace("the sum over k", total)
    return total
