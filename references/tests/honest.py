"""An honest kernel: the recipe in plain float32 torch, with its own summation order and its own choices where a recipe leaves one.

Shares no arithmetic with the reference: torch casts, float32 matmuls, torch's softmax and activations. Checkpoint weights are used as
stored (no online quantization, no requantization).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from references.formats import limits, torch_dtype
from references.moe import Answer, Expert, Projection, Routing
from references.vocabulary import Activation, ActQuant, Format, Layout, Recipe, Rounding, RouterWeight


@dataclass(frozen=True)
class Choices:
    """What a kernel is free to choose."""

    seed: int = 0  # order of the sum over K
    reciprocal: bool = False  # quotients by reciprocal
    weight_scale_first: bool = False
    sequential: bool = False  # one addition at a time instead of BLAS


@dataclass(frozen=True)
class Rows:
    """What enters a GEMM: codes [R, K] and scale [R, G], float32."""

    codes: torch.Tensor
    scale: torch.Tensor


def _matmul(a: torch.Tensor, w: torch.Tensor, choices: Choices) -> torch.Tensor:
    order = torch.randperm(a.shape[1], generator=torch.Generator().manual_seed(choices.seed))
    if not choices.sequential:
        return a[:, order] @ w[:, order].T
    total = torch.zeros(a.shape[0], w.shape[0])
    for k in order.tolist():
        total = total + a[:, k : k + 1] * w[:, k]
    return total


def _codes(ratio: torch.Tensor, how: ActQuant) -> torch.Tensor:
    info = limits(how.format)
    ratio = ratio.clamp(info.min, info.max)
    if how.format is not Format.INT8:
        return ratio.to(torch_dtype(how.format)).float()
    match how.rounding:
        case Rounding.HALF_EVEN:
            return ratio.round()
        case Rounding.HALF_AWAY:
            return torch.sign(ratio) * torch.floor(ratio.abs() + 0.5)
        case Rounding.TOWARD_ZERO:
            return ratio.trunc()


def _quantize(x: torch.Tensor, how: ActQuant | None, static: float | None, choices: Choices) -> Rows:
    rows, cols = x.shape
    if how is None:
        return Rows(x, torch.ones(rows, 1))
    if static is not None:
        scale = torch.full((rows, 1), static)
    else:
        groups = torch.split(x, 128, 1) if how.layout is Layout.GROUP128 else (x,)
        amax = torch.stack([g.abs().amax(1) for g in groups], 1)
        amax = amax.max().expand(rows, 1) if how.layout is Layout.TENSOR else amax
        scale = (amax / limits(how.format).qmax).to(torch_dtype(how.scale_store)).float().clamp_min(how.scale_floor)
    wide = scale if scale.shape[1] == 1 else scale.repeat_interleave(128, 1)[:, :cols]
    return Rows(_codes(x * (1.0 / wide) if choices.reciprocal else x / wide, how), scale)


def _project(rows: Rows, part: Projection, choices: Choices) -> torch.Tensor:
    weight = part.codes.float()
    count = weight.shape[0]
    blocks = part.scale if part.scale is not None and part.layout is Layout.BLOCK128 else None
    if blocks is None:
        w_scale = torch.ones(1, count) if part.scale is None else part.scale.reshape(1, -1)
        total = _matmul(rows.codes, weight, choices)
        total = total * w_scale * rows.scale if choices.weight_scale_first else total * rows.scale * w_scale
    else:
        total = torch.zeros(rows.codes.shape[0], count)
        for g in range(blocks.shape[1]):
            w_scale = blocks[:, g].repeat_interleave(128)[:count]
            a_scale = rows.scale[:, g : g + 1]
            product = _matmul(rows.codes[:, 128 * g : 128 * (g + 1)], weight[:, 128 * g : 128 * (g + 1)], choices)
            total = total + (product * w_scale * a_scale if choices.weight_scale_first else product * a_scale * w_scale)
    return total if part.bias is None else total + part.bias.float()


def _act(activation: Activation, x: torch.Tensor) -> torch.Tensor:
    functional = torch.nn.functional
    match activation:
        case Activation.SILU | Activation.SILU_NO_MUL:
            return x / (1.0 + torch.exp(-x))
        case Activation.GELU | Activation.GELU_NO_MUL:
            return functional.gelu(x)
        case Activation.GELU_TANH | Activation.GELU_TANH_NO_MUL:
            return functional.gelu(x, approximate="tanh")
        case _:
            return functional.relu(x).square()


def _cast(x: torch.Tensor, fmt: Format | None) -> torch.Tensor:
    return x if fmt is None else x.to(torch_dtype(fmt)).float()


def _parts(expert: Expert, second: bool) -> list[Projection]:
    return [expert.down] if second else [part for part in (expert.gate, expert.up) if part is not None]


def run(
    experts: tuple[Expert, ...],
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    routing: Routing,
    activation: Activation,
    recipe: Recipe,
    choices: Choices,
    *,
    renormalize: bool = True,
) -> torch.Tensor:
    """[M, H] in the output dtype."""
    ids = routing.topk_ids
    tokens, top_k = ids.shape
    weights = torch.softmax(router_logits.float(), -1).gather(1, ids)
    weights = weights / weights.sum(1, keepdim=True) if renormalize else weights

    def gemm(x: torch.Tensor, how: ActQuant | None, second: bool, weighted: bool) -> torch.Tensor:
        static = None
        if how is not None and not how.dynamic:
            scales = [part.input_scale for expert in experts for part in _parts(expert, second)]
            static = max(float(scale) for scale in scales if scale is not None)
        quantized = _quantize(x, how, static, choices)
        out = []
        for row, e in enumerate(ids.flatten().tolist()):
            one = Rows(quantized.codes[row : row + 1], quantized.scale[row : row + 1])
            value = torch.cat([_project(one, part, choices) for part in _parts(experts[e], second)], 1)
            value = value * weights.flatten()[row] if weighted else value
            for fmt in recipe.compute:
                value = _cast(value, fmt)
            out.append(value)
        return torch.cat(out)

    x = hidden_states * weights.to(hidden_states.dtype) if recipe.router_weight is RouterWeight.INPUT else hidden_states
    h13 = gemm(x.float().repeat_interleave(top_k, 0), recipe.a1, False, recipe.router_weight is RouterWeight.GEMM1)
    if activation.gated:
        gate, up = h13.chunk(2, 1)
        middle = _cast(_act(activation, gate), recipe.gate_store) * up
    else:
        middle = _act(activation, h13)
    out = gemm(_cast(middle, recipe.activation_store), recipe.a2, True, recipe.router_weight is RouterWeight.GEMM2)
    return out.reshape(tokens, top_k, -1).sum(1).to(torch_dtype(recipe.output))


def margin(answer: Answer, actual: torch.Tensor) -> torch.Tensor:
    """Per element: distance of ``expected`` from the reals that round to ``actual``, over the allowed radius on that side."""
    value = actual.double()
    info = limits(answer.output)
    ulp = torch.ldexp(torch.ones_like(value), torch.frexp(value)[1] - info.significand_bits).clamp_min(info.min_subnormal)
    short = (value - ulp / 2 - answer.expected).clamp_min(0) + (answer.expected - value - ulp / 2).clamp_min(0)
    room = torch.where(value > answer.expected, answer.high - answer.expected, answer.expected - answer.low)
    return torch.where(short == 0, torch.zeros_like(short), short / room)


def inside(answer: Answer, actual: torch.Tensor) -> torch.Tensor:
    """Per element: round(low) <= actual <= round(high), with torch's own casts."""
    dtype = torch_dtype(answer.output)
    low, high = (end.to(torch.float32).to(dtype) for end in (answer.low, answer.high))
    return (low <= actual) & (actual <= high)
