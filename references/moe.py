"""The layer in float64: its types, and the recipe evaluated on numbers (references/enclosure.py evaluates it on intervals)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from references.accumulators import tf32
from references.activations import function
from references.formats import round_to
from references.gating import gated, has_parameters
from references.microscaling import nvfp4
from references.quantize import quantize_activations
from references.vocabulary import Accumulator, Activation, ActQuant, Epilogue, Format, Layout, Recipe, RouterWeight, Swiglu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from references.loading import LoadedExpert, Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """One weight matrix as the checkpoint holds it. (decoded(codes) - zero_point) * scale * global_scale is the weight."""

    codes: torch.Tensor  # [N, K] in the format's torch dtype, one code each
    format: Format
    layout: Layout
    scale: torch.Tensor | None = None  # f32; TENSOR [], CHANNEL [N, 1], BLOCK128 [ceil(N/128), ceil(K/128)], groups [N, ceil(K/width)]
    input_scale: torch.Tensor | None = None  # f32 [], static activation scale (NVFP4: the global one)
    bias: torch.Tensor | None = None  # [N]
    zero_point: torch.Tensor | None = None  # codes of the same format in the scale's shape; asymmetric formats only
    global_scale: torch.Tensor | None = None  # f32 [], multiplies every scale (NVFP4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """gate and up are w1 and w3 [I, H]; gate is None for non-gated layers. down is w2 [H, I]."""

    gate: Projection | None
    up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class RowsByExpert:
    """owner [R] int64: each row's expert; parts: every expert that has rows, ascending, and their indices."""

    owner: torch.Tensor
    parts: list[tuple[int, torch.Tensor]]
    order: torch.Tensor  # [R]: one expert's rows after another's
    back: torch.Tensor  # [R]: where in that order each row is

    @classmethod
    def of(cls, owner: torch.Tensor) -> RowsByExpert:
        """``owner`` [R]."""
        parts = rows_of_each(owner)
        order = torch.cat([mine for _, mine in parts])
        return cls(owner, parts, order, order.argsort())


@dataclass(frozen=True, kw_only=True)
class Routing:
    """topk_ids [M, k] int64, topk_weights [M, k] float64, in descending order of weight.

    exact: the weights are what any fp32 evaluation gives (given as tensors, or equal to 1/k for a power of two k).
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    exact: bool = False

    @cached_property
    def rows(self) -> RowsByExpert:
        """The flattened (token, slot) rows."""
        return RowsByExpert.of(self.topk_ids.flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the reference says. All float64 on the CPU.

    expected [M, H]: the recipe on numbers, *before* the last rounding to ``output``; contributions [M, k, H] sum to it.
    low, high [M, H]: the recipe on intervals, before the last rounding; low <= expected <= high.
    output: the dtype of the last rounding. An actual value is honest when round(low) <= actual <= round(high).
    gain_bias: relative bias the recipe itself allows (0 for unbiased accumulators).
    loaded: the weights all of it was computed with.
    row_scale_doubt [M, k]: how far w2's dynamic activation scale may be from the expected one, relative; None where a row has none of its
        own (static, or one a group).
    """

    expected: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    contributions: torch.Tensor
    routing: Routing
    output: Format
    gain_bias: float = 0.0
    loaded: tuple[LoadedExpert, ...] = ()
    row_scale_doubt: torch.Tensor | None = None


def quantized_rows(rows: torch.Tensor, how: ActQuant | None, static_scale: torch.Tensor | None) -> torch.Tensor:
    """What a GEMM multiplies for ``rows`` [R, K] float64: codes times scale, or the rows themselves when they stay unquantized.

    static_scale: [R, 1] float64 for a static quantizer.
    """
    if how is None:
        return rows
    if how.microscaled:
        assert static_scale is not None
        return nvfp4(rows, static_scale, how)
    quantized = quantize_activations(rows, how, static_scale)
    return quantized.codes * quantized.scale


def entering(
    rows: torch.Tensor, how: ActQuant | None, recipe: Recipe, static_scale: torch.Tensor | None, owner: torch.Tensor
) -> torch.Tensor:
    """``quantized_rows``, all or those of each expert (``owner`` [R]) by themselves, and TF32 where a tensor core reads fp32 rows."""
    if how is not None and how.per_expert:
        values = torch.empty_like(rows)
        for _, mine in rows_of_each(owner):
            values[mine] = quantized_rows(rows[mine], how, None if static_scale is None else static_scale[mine])
        return values
    values = quantized_rows(rows, how, static_scale)
    return tf32(values) if how is None and reads_tf32(recipe) else values


def rows_of_each(owner: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Every expert that has rows, ascending, and their indices; owner [R]."""
    order = owner.argsort(stable=True)
    used, counts = (each.tolist() for each in owner[order].unique_consecutive(return_counts=True))
    return list(zip(used, order.split(counts), strict=True))


def reads_tf32(recipe: Recipe) -> bool:
    """Whether unquantized operands are fp32 and meet tensor cores."""
    return recipe.accumulator is Accumulator.TENSOR_CORE and recipe.output is Format.FP32


def first_gemm(recipe: Recipe) -> Recipe:
    """The recipe of GEMM 1: its results stay in fp32 where the activation is part of it."""
    return recipe if recipe.first_stored else replace(recipe, compute=(Format.FP32,))


def round_through(values: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Results ``values`` of a GEMM rounded to each format in turn."""
    share = recipe.stored_share
    values = values if share == 1.0 else values * share
    for fmt in recipe.compute:
        values = round_to(values, fmt)
    return values if share == 1.0 else round_to(values / share, recipe.compute[-1])


def static_rows(per_expert: list[float | None], topk_ids: torch.Tensor) -> torch.Tensor | None:
    """Static activation scales of the flattened (token, slot) rows, [M*k, 1] float64; None for dynamic recipes."""
    if per_expert[0] is None:
        return None
    return torch.tensor(per_expert, dtype=torch.float64)[topk_ids.flatten()].unsqueeze(1)


def forward(
    loaded: tuple[LoadedExpert, ...], hidden_states: torch.Tensor, routing: Routing, activation: Activation, recipe: Recipe
) -> torch.Tensor:
    """The recipe on numbers: contributions [M, k, H] float64, router weight included, before the sum over k.

    hidden_states [M, H] in the hidden dtype. fp32 steps (accumulation, scales, bias, router weight) are evaluated in float64: their
    roundings are the intervals' business. Roundings to a stored dtype and quantizers are applied as the recipe orders them.

    Raises:
        ValueError: when the router weight is on the input and k is not 1.
    """
    tokens, top_k = routing.topk_ids.shape
    hidden_format = recipe.compute[-1]
    weights = routing.topk_weights.reshape(-1, 1)
    if recipe.router_weight_exact:  # given to the kernel as fp32
        weights = round_to(weights, Format.FP32)
    if recipe.router_weight_store is not None:
        weights = round_to(weights, recipe.router_weight_store)
    x = hidden_states.to(torch.float64)
    if recipe.router_weight is RouterWeight.INPUT:
        if top_k != 1:
            raise ValueError(f"the router weight can be applied to the hidden states for top-k 1 only, got {top_k}")
        x = round_to(x * round_to(weights, hidden_format), hidden_format)
    rows = x.repeat_interleave(top_k, 0)
    owner = routing.topk_ids.flatten()
    first = entering(rows, recipe.a1, recipe, static_rows([e.a1_scale for e in loaded], routing.topk_ids), owner)
    places = (recipe.router_weight, recipe.router_weight_again)
    on_first = weights if RouterWeight.GEMM1 in places else None
    h13 = _gemms(first, [e.w13 for e in loaded], routing.rows, on_first, first_gemm(recipe))
    if RouterWeight.FIRST_STORED in places:
        given = weights * _factors([e.first_router_factor for e in loaded], owner)
        h13 = round_to(h13 * round_to(given, hidden_format), hidden_format)
    intermediate = round_to(_activated(h13, activation, recipe), recipe.activation_store)
    second = entering(intermediate, recipe.a2, recipe, static_rows([e.a2_scale for e in loaded], routing.topk_ids), owner)
    out = _gemms(second, [e.w2 for e in loaded], routing.rows, weights if RouterWeight.GEMM2 in places else None, recipe)
    if RouterWeight.STORED in places:
        given = weights * _factors([e.router_factor for e in loaded], owner)
        out = round_to(out * round_to(given, hidden_format), hidden_format)
    if RouterWeight.SUM in places:
        out = out * weights
    return out.reshape(tokens, top_k, -1)


def _factors(per_expert: list[float], owner: torch.Tensor) -> torch.Tensor:
    return torch.tensor(per_expert, dtype=torch.float64)[owner].unsqueeze(1)


def _gemms(
    rows: torch.Tensor, matrices: Sequence[Matrix], rows_of: RowsByExpert, weights: torch.Tensor | None, recipe: Recipe
) -> torch.Tensor:
    """The GEMM of every row's expert with all that is done to its result, [R, K] -> [R, N]; weights [R, 1]."""
    after = scales_stored(matrices[0], recipe)
    products = [rows[mine] @ (matrices[e].codes if after else matrices[e].values).T for e, mine in rows_of.parts]
    product = torch.cat(products)[rows_of.back]
    bias = _of_rows([matrix.bias for matrix in matrices], rows_of.owner)
    if bias is not None and recipe.epilogue is Epilogue.FP32:
        product = product + bias
    if weights is not None:
        product = product * weights
    scale = _of_rows([matrix.scale for matrix in matrices], rows_of.owner) if after else None
    return _stored(product, None if scale is None else scale[..., 0], bias, recipe)


def _of_rows(of_experts: Sequence[torch.Tensor | None], owner: torch.Tensor) -> torch.Tensor | None:
    given = [each for each in of_experts if each is not None]
    assert len(given) in (0, len(of_experts))
    return torch.stack(given)[owner] if given else None


def scales_stored(matrix: Matrix, recipe: Recipe) -> bool:
    """Whether the weight scale multiplies the stored result."""
    if recipe.epilogue is Epilogue.CHANNEL_THEN_BIAS:
        return matrix.scale is not None and matrix.scale.shape[-1] == 1 and matrix.store is None
    return recipe.epilogue is Epilogue.CHANNEL_STORED


def _stored(product: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, recipe: Recipe) -> torch.Tensor:
    """scale: what multiplies the stored result."""
    fmt = recipe.compute[-1]
    product = round_through(product, recipe)
    bias = None if bias is None else round_to(bias, fmt)
    match recipe.epilogue:
        case Epilogue.CHANNEL_STORED if scale is not None:
            return round_to(product * scale + (0.0 if bias is None else bias), fmt)
        case Epilogue.CHANNEL_THEN_BIAS if scale is not None:
            product = round_to(product * scale, fmt)
            return product if bias is None else round_to(product + bias, fmt)
        case Epilogue.BIAS_STORED | Epilogue.CHANNEL_THEN_BIAS if bias is not None:
            return round_to(product + bias, fmt)
        case _:
            return product


def _activated(h13: torch.Tensor, activation: Activation, recipe: Recipe) -> torch.Tensor:
    if not activation.gated:
        return function(activation)(h13)
    gate, up = h13.chunk(2, 1)
    if has_parameters(activation, recipe.swiglu):
        return gated(activation, recipe.swiglu or Swiglu(), gate, up, recipe.gate_store)
    gate = function(activation)(gate)
    return (gate if recipe.gate_store is None else round_to(gate, recipe.gate_store)) * up
