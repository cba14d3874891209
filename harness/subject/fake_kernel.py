"""An honest kernel for the fake subject: the recipe in float32 and the real storage dtypes, its own loading, its own order of sums.

Shares no arithmetic with the reference (torch casts, float32 products in chunks from the end of K, float32 softmax and activations), so
that honest margins mean something. It reads LoadedExpert because that is what faults are put into; codes there are exact values.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from references.formats import limits, saturate, torch_dtype
from references.loading import LoadedExpert, Matrix
from references.moe import Expert, Projection, Routing
from references.scales import GROUP
from references.vocabulary import (
    Accumulator,
    Activation,
    ActQuant,
    Format,
    Layout,
    Quotient,
    Recipe,
    Rounding,
    RouterWeight,
    Swiglu,
    W13Merge,
    WeightQuant,
)

_GROUPS = (Layout.GROUP16, Layout.GROUP32, Layout.GROUP64, Layout.GROUP128)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CHUNK = 48  # columns of K per float32 product: no multiple of the reference's anything


def cast(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """float32 ``x`` stored in ``fmt`` and read back."""
    return x.to(torch_dtype(fmt)).float()


# ------------------------------------------------------------------------------------------------------------------- loading


def load(experts: tuple[Expert, ...], recipe: Recipe) -> tuple[LoadedExpert, ...]:
    """What loading makes of the checkpoint: halves stacked, quantized online or requantized, static scales collapsed."""
    out = []
    for expert in experts:
        halves = [half for half in (expert.gate, expert.up) if half is not None]
        out.append(
            LoadedExpert(
                w13=_merged(halves, recipe),
                w2=_merged([expert.down], replace(recipe, w13_merge=W13Merge.AS_STORED)),
                a1_scale=_largest(recipe.a1, halves),
                a2_scale=_largest(recipe.a2, [expert.down]),
            )
        )
    if recipe.static_scale_max:
        first, second = (_collapsed([getattr(e, name) for e in out]) for name in ("a1_scale", "a2_scale"))
        out = [replace(e, a1_scale=first, a2_scale=second) for e in out]
    return tuple(out)


def _largest(how: ActQuant | None, parts: list[Projection]) -> float | None:
    if how is None or not how.takes_static:
        return None
    return max(float(part.input_scale) for part in parts if part.input_scale is not None)


def _collapsed(scales: list[float | None]) -> float | None:
    given = [scale for scale in scales if scale is not None]
    return max(given) if given else None


def _merged(parts: list[Projection], recipe: Recipe) -> Matrix:
    codes = torch.cat([_decoded(part) for part in parts])
    biases = [part.bias for part in parts if part.bias is not None]
    fmt = parts[0].format
    if recipe.weight_quant is not None:
        how = recipe.weight_quant
        sizes = [part.codes.shape[0] for part in parts] if how.layout is Layout.BLOCK128 else [codes.shape[0]]
        quantized = [_quantized(part, how) for part in codes.split(sizes)]
        codes, scale, fmt = torch.cat([q[0] for q in quantized]), torch.cat([q[1] for q in quantized]), how.format
    elif parts[0].scale is None:
        scale = None
    else:
        scale = torch.cat([_rows(part) for part in parts])
        if recipe.w13_merge is W13Merge.REQUANTIZE_TO_MAX and len(parts) == 2:
            largest = scale.max()
            again = codes * scale / largest
            codes = torch.where(scale == largest, codes, _onto(again, fmt, Rounding.HALF_EVEN))
            scale = largest.expand_as(scale)
    exact = codes.double()
    return Matrix(
        codes=exact,
        low=exact,
        high=exact,
        format=fmt,
        scale=None if scale is None else scale.double(),
        bias=torch.cat(biases).double() if biases else None,
        store=recipe.weight_store if parts[0].layout in _GROUPS or parts[0].zero_point is not None else None,
        width=parts[0].layout.width or GROUP,
    )


def _decoded(part: Projection) -> torch.Tensor:
    """[N, K] float32: what the codes stand for before their scale."""
    if part.format is Format.E2M1:
        sign = torch.where(part.codes >= 8, -1.0, 1.0)
        return sign * torch.tensor(_E2M1)[(part.codes % 8).long()]
    codes = part.codes.float()
    if part.zero_point is None:
        return codes
    return codes - _wide(part.zero_point.float(), codes.shape[1], part.layout.width or GROUP)


def _rows(part: Projection) -> torch.Tensor:
    """[N, G] float32."""
    rows = part.codes.shape[0]
    assert part.scale is not None
    if part.layout is Layout.BLOCK128:
        return part.scale.repeat_interleave(GROUP, 0)[:rows]
    if part.layout in _GROUPS:
        return part.scale if part.global_scale is None else part.scale * part.global_scale
    return part.scale.reshape(-1, 1).expand(rows, 1)


def _quantized(w: torch.Tensor, how: WeightQuant) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] and scale [N, G], float32, of hidden-dtype weights."""
    rows, cols = w.shape
    store = torch_dtype(how.arithmetic)
    if how.layout is Layout.BLOCK128:
        blocks = [[b.abs().max() for b in strip.split(GROUP, 1)] for strip in w.split(GROUP, 0)]
        amax = torch.stack([torch.stack(strip) for strip in blocks]).repeat_interleave(GROUP, 0)[:rows]
    else:
        amax = w.abs().amax(1, keepdim=True) if how.layout is Layout.CHANNEL else w.abs().max().expand(rows, 1)
    qmax = limits(how.format).qmax
    scale = (amax.to(store) / qmax).clamp_min(how.scale_floor)
    wide = _wide(scale, cols)
    ratio = _divided(w.to(store), wide, _wide(amax.to(store).clamp_min(how.scale_floor * qmax), cols), qmax, how.quotient).float()
    return _onto(ratio.clamp(-qmax, qmax), how.format, how.rounding), scale.float()


# ----------------------------------------------------------------------------------------------------------------- quantizers


def _wide(scale: torch.Tensor, cols: int, width: int = GROUP) -> torch.Tensor:
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(width, 1)[:, :cols]


def _divided(x: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, qmax: float, how: Quotient) -> torch.Tensor:
    match how:
        case Quotient.DIVIDE | Quotient.ANY:
            ratio = x / scale
        case Quotient.RECIPROCAL:
            ratio = x * (1.0 / scale)
        case Quotient.AMAX_RATIO:
            ratio = x * (torch.full_like(amax, qmax) / amax)  # qmax / amax would be amax.reciprocal() * qmax: two roundings
    return torch.where(scale == 0, torch.zeros_like(ratio), ratio)


def _onto(ratio: torch.Tensor, fmt: Format, rounding: Rounding) -> torch.Tensor:
    """float32 quotients as saturated codes, float32."""
    info = limits(fmt)
    ratio = ratio.clamp(info.min, info.max)
    if fmt is not Format.INT8:
        if rounding is Rounding.HALF_EVEN:
            return ratio.to(torch_dtype(fmt)).float()
        return saturate(ratio.double(), fmt, rounding).float()  # torch has no such cast
    match rounding:
        case Rounding.HALF_EVEN:
            return ratio.round()
        case Rounding.HALF_AWAY:
            return torch.copysign(torch.floor(ratio.abs() + 0.5), ratio)
        case Rounding.TOWARD_ZERO:
            return ratio.trunc()


def _quantize(x: torch.Tensor, how: ActQuant | None, static: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [R, K] and scale [R, 1] or [R, groups] of float32 rows."""
    rows, cols = x.shape
    if how is None:
        return x, torch.ones(rows, 1)
    if how.microscaled and how.store is not None:
        assert static is not None
        return _nvfp4(x, 1.0 / static, how.store), torch.ones(rows, 1)
    qmax = limits(how.format).qmax
    if static is not None:
        scale = amax = static
    else:
        strips = x.split(GROUP, 1) if how.layout is Layout.GROUP128 else (x,)
        amax = torch.stack([strip.abs().amax(1) for strip in strips], 1)
        amax = amax.max().expand(rows, 1) if how.layout is Layout.TENSOR else amax
        scale = cast(amax / qmax, how.scale_store).clamp_min(torch.tensor(how.scale_floor).to(torch_dtype(how.scale_store)).item())
    ratio = _divided(x, _wide(scale, cols), _wide(amax.clamp_min(how.scale_floor * qmax), cols), qmax, how.quotient)
    codes = _onto(ratio, how.format, how.rounding)
    return codes if how.of_nan is None else codes.nan_to_num(nan=how.of_nan), scale


def _nvfp4(x: torch.Tensor, g: torch.Tensor, store: Format) -> torch.Tensor:
    """[R, K] as NVFP4 keeps it, g [R, 1] the global scale that amax is multiplied by; multiplied out into ``store``."""
    groups = x.unflatten(1, (-1, 16))
    scale = (g * (groups.abs().amax(2) * torch.tensor(1.0 / 6.0))).clamp_max(448.0).to(torch.float8_e4m3fn).float()
    factor = torch.where(scale == 0, torch.zeros_like(scale), g / scale)
    ratio = (groups * factor.unsqueeze(2)).clamp(-6.0, 6.0)
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    odd = torch.tensor([False, True, False, True, False, True, False])  # ties go up where the code below is odd
    size = ratio.abs()
    steps = torch.where(odd, size.unsqueeze(-1) >= edges, size.unsqueeze(-1) > edges).sum(-1)
    value = torch.copysign(torch.tensor(_E2M1)[steps], ratio)
    return cast((value * (scale / g).unsqueeze(2)).flatten(1), store)


# ------------------------------------------------------------------------------------------------------------------ the layer


def _product(a: torch.Tensor, w: torch.Tensor, accumulator: Accumulator) -> torch.Tensor:
    """a [R, K] times w [N, K] transposed, float32."""
    if accumulator is Accumulator.INT32:
        return (a.double() @ w.double().T).float()  # integers: exact, then converted once
    total = torch.zeros(a.shape[0], w.shape[0])
    for start in reversed(range(0, a.shape[1], _CHUNK)):
        total += a[:, start : start + _CHUNK] @ w[:, start : start + _CHUNK].T
    return total


def _gemm(codes: torch.Tensor, a_scale: torch.Tensor, matrix: Matrix, weight: torch.Tensor | None, recipe: Recipe) -> torch.Tensor:
    w = matrix.codes.float()
    w_scale = torch.ones(w.shape[0], 1) if matrix.scale is None else matrix.scale.float()
    if matrix.store is not None:
        w, w_scale = cast(w * _wide(w_scale, w.shape[1], matrix.width), matrix.store), torch.ones(w.shape[0], 1)
    if max(a_scale.shape[1], w_scale.shape[1]) == 1:
        total = _product(codes, w, recipe.accumulator) * w_scale.T * a_scale
    else:
        total = torch.zeros(codes.shape[0], w.shape[0])
        for g, (part, against) in enumerate(zip(codes.split(GROUP, 1), w.split(GROUP, 1), strict=True)):
            scales = w_scale[:, g % w_scale.shape[1]] * a_scale[:, g % a_scale.shape[1]].unsqueeze(1)
            total += _product(part, against, recipe.accumulator) * scales
    if matrix.bias is not None:
        total = total + matrix.bias.float()
    return total if weight is None else total * weight


def _act(activation: Activation, x: torch.Tensor) -> torch.Tensor:
    functional = torch.nn.functional
    match activation:
        case Activation.SILU | Activation.SILU_NO_MUL | Activation.SWIGLUSTEP:
            return x / (1.0 + torch.exp(-x))
        case Activation.GELU | Activation.GELU_NO_MUL:
            return functional.gelu(x)
        case Activation.GELU_TANH | Activation.GELU_TANH_NO_MUL:
            return functional.gelu(x, approximate="tanh")
        case Activation.RELU2_NO_MUL:
            return functional.relu(x).square()
        case _:
            raise ValueError(f"{activation} is a product")


def _gated(activation: Activation, swiglu: Swiglu, gate: torch.Tensor, up: torch.Tensor, gate_store: Format | None) -> torch.Tensor:
    """float32; swiglu's limits, slopes and offsets where the activation has them."""
    if swiglu.limit is not None:
        up = torch.minimum(torch.maximum(up, torch.tensor(-swiglu.limit)), torch.tensor(swiglu.limit))
    if activation is Activation.SITU:
        beta = swiglu.situ or 1.0
        act = beta * torch.tanh(gate / beta) / (1.0 + torch.exp(-gate))
        up = up if swiglu.linear is None else swiglu.linear * torch.tanh(up / swiglu.linear)
    elif activation is Activation.SWIGLUSTEP:
        act = _act(activation, gate)
        act = act if swiglu.limit is None else act.clamp_max(swiglu.limit)
    else:
        gate = gate if swiglu.limit is None else gate.clamp_max(swiglu.limit)
        act = gate / (1.0 + torch.exp(-swiglu.alpha * gate))
    up = up + swiglu.beta
    return (act if gate_store is None else cast(act, gate_store)) * (up if swiglu.up_store is None else cast(up, swiglu.up_store))


def route(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> Routing:
    """Softmax top-k in float32."""
    weights, ids = torch.softmax(router_logits.float(), -1).topk(top_k, -1)
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    return Routing(topk_ids=ids, topk_weights=weights.double())


def forward(
    loaded: tuple[LoadedExpert, ...], hidden_states: torch.Tensor, routing: Routing, activation: Activation, recipe: Recipe
) -> torch.Tensor:
    """Contributions [M, k, H] float32, each already stored in the recipe's compute dtype."""
    tokens, top_k = routing.topk_ids.shape
    owner, weights = routing.topk_ids.flatten(), routing.topk_weights.float().reshape(-1, 1)
    weights = weights if recipe.router_weight_store is None else cast(weights, recipe.router_weight_store)
    x = hidden_states.float().repeat_interleave(top_k, 0)
    if recipe.router_weight is RouterWeight.INPUT:
        x = cast(x * cast(weights, recipe.output), recipe.output)

    def experts_gemm(x: torch.Tensor, how: ActQuant | None, name: str, weighted: bool) -> torch.Tensor:
        scales = [getattr(expert, "a1_scale" if name == "w13" else "a2_scale") for expert in loaded]
        static = None if how is None or not how.takes_static else torch.tensor(scales)[owner].unsqueeze(1)
        codes, a_scale = _quantize(x, how, static)
        out = torch.empty(x.shape[0], getattr(loaded[0], name).codes.shape[0])
        for e in owner.unique().tolist():
            mine = (owner == e).nonzero().flatten()
            own = _quantize(x[mine], how, None) if how is not None and how.per_expert else (codes[mine], a_scale[mine])
            out[mine] = _gemm(*own, getattr(loaded[e], name), weights[mine] if weighted else None, recipe)
        for fmt in recipe.compute if recipe.first_stored or name == "w2" else ():
            out = cast(out * recipe.stored_share, fmt) / recipe.stored_share
        return out

    places = (recipe.router_weight, recipe.router_weight_again)
    h13 = experts_gemm(x, recipe.a1, "w13", RouterWeight.GEMM1 in places)
    if RouterWeight.FIRST_STORED in places:
        h13 = cast(h13 * cast(weights, recipe.output), recipe.output)
    if activation.gated:
        gate, up = h13.chunk(2, 1)
        if recipe.swiglu is not None:
            middle = _gated(activation, recipe.swiglu, gate, up, recipe.gate_store)
        else:
            gate = _act(activation, gate)
            middle = (gate if recipe.gate_store is None else cast(gate, recipe.gate_store)) * up
    else:
        middle = _act(activation, h13)
    middle = cast(middle, recipe.activation_store)
    out = experts_gemm(middle, recipe.a2, "w2", RouterWeight.GEMM2 in places)
    if RouterWeight.STORED in places:
        out = cast(out * cast(weights, recipe.output), recipe.output)
    if recipe.router_weight is RouterWeight.SUM:
        out = out * weights
    return out.reshape(tokens, top_k, -1)


def combine(contributions: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """[M, H] in the output dtype: the k contributions, stored again in the compute dtype, added from the last to the first."""
    stored = contributions
    again = {RouterWeight.STORED: (recipe.output,), RouterWeight.SUM: ()}  # in the sum it multiplies what is stored
    for fmt in again.get(recipe.router_weight, recipe.compute):
        stored = cast(stored, fmt)
    total = stored[:, -1]
    for slot in reversed(range(stored.shape[1] - 1)):
        total = total + stored[:, slot]
        total = total if recipe.slots_store is None else cast(total, recipe.slots_store)
    return total.to(torch_dtype(recipe.output))
