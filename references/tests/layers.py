"""Small layers for the tests: random weights quantized by torch alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from references.formats import limits, torch_dtype
from references.moe import Expert, Projection, Routing
from references.routing import route
from references.scales import GROUP
from references.vocabulary import Accumulator, Activation, ActQuant, Format, Layout, Recipe, Rounding, RouterWeight


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Everything an answer needs, and the logits its routing came from."""

    experts: tuple[Expert, ...]
    hidden_states: torch.Tensor
    logits: torch.Tensor
    routing: Routing
    activation: Activation
    recipe: Recipe


def _block_scale(w: torch.Tensor, qmax: float) -> torch.Tensor:
    rows, cols = (-(-size // GROUP) for size in w.shape)
    scale = torch.empty(rows, cols)
    for i in range(rows):
        for j in range(cols):
            scale[i, j] = w[GROUP * i : GROUP * (i + 1), GROUP * j : GROUP * (j + 1)].abs().max() / qmax
    return scale


def projection(
    w: torch.Tensor,
    fmt: Format,
    layout: Layout,
    *,
    bias: torch.Tensor | None,
    input_scale: float | None,
    scale: torch.Tensor | None = None,
) -> Projection:
    """``w`` [N, K] float32 quantized per ``layout``, with a TENSOR scale of the caller's choice."""
    qmax = limits(fmt).qmax
    given = None if input_scale is None else torch.tensor(input_scale)
    match layout:
        case Layout.TENSOR:
            scale = w.abs().max() / qmax if scale is None else scale
        case Layout.CHANNEL:
            scale = w.abs().amax(1, keepdim=True) / qmax
        case Layout.BLOCK128:
            scale = _block_scale(w, qmax)
        case _:
            return Projection(codes=w.to(torch_dtype(fmt)), format=fmt, layout=Layout.NONE, bias=bias, input_scale=given)
    wide = scale
    if layout is Layout.BLOCK128:
        wide = scale.repeat_interleave(GROUP, 0)[: w.shape[0]].repeat_interleave(GROUP, 1)[:, : w.shape[1]]
    ratio = (w / wide).clamp(-qmax, qmax)
    codes = (ratio.round() if fmt is Format.INT8 else ratio).to(torch_dtype(fmt))
    return Projection(codes=codes, format=fmt, layout=layout, scale=scale, bias=bias, input_scale=given)


def make(
    hidden: Format = Format.FP32,
    weight: Format = Format.INT8,
    layout: Layout = Layout.CHANNEL,
    act: Layout | None = Layout.TOKEN,
    *,
    static: bool = False,
    activation: Activation = Activation.SILU,
    experts: int = 3,
    top_k: int = 2,
    tokens: int = 5,
    width: int = 160,
    inner: int = 96,
    bias: bool = False,
    rounding: Rounding = Rounding.HALF_EVEN,
    router_weight: RouterWeight = RouterWeight.GEMM2,
    compute: tuple[Format, ...] | None = None,
    seed: int = 0,
) -> Layer:
    """A dense random layer; ``act`` None leaves activations unquantized."""
    g = torch.Generator().manual_seed(seed)

    def random(rows: int, cols: int, gain: float, scale: float) -> Projection:
        w = torch.randn(rows, cols, generator=g) * gain / cols**0.5
        offset = torch.randn(rows, generator=g) if bias else None
        return projection(w, weight, layout, bias=offset, input_scale=scale if static else None)

    qmax = limits(weight).qmax
    built = tuple(
        Expert(
            gate=random(inner, width, 1.0, 4.0 / qmax) if activation.gated else None,
            up=random(inner, width, 1.3, 4.0 / qmax),
            down=random(width, inner, 1.0 + e, 3.0 / qmax),
        )
        for e in range(experts)
    )
    x = (torch.randn(tokens, width, generator=g) * torch.exp2(torch.arange(tokens) % 4 - 1.0).unsqueeze(1)).to(torch_dtype(hidden))
    logits = torch.randn(tokens, experts, generator=g) * 2
    how = None if act is None else ActQuant(format=weight, layout=act, dynamic=not static, rounding=rounding, scale_floor=1e-12)
    integers = weight is Format.INT8 and how is not None
    recipe = Recipe(
        name="test",
        a1=how,
        a2=how,
        compute=compute or (hidden,),
        activation_store=hidden,
        gate_store=hidden if activation.gated else None,
        output=hidden,
        accumulator=Accumulator.INT32 if integers else Accumulator.FP32,
        router_weight=router_weight,
    )
    return Layer(
        experts=built,
        hidden_states=x,
        logits=logits,
        routing=route(logits, top_k, renormalize=True),
        activation=activation,
        recipe=recipe,
    )
