"""Which experts play a part: the one whose weights are all zero, the one nobody is routed to."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from cases.axes import ActScale, Origin

if TYPE_CHECKING:
    from cases.case import MoECase

_MIN_EXPERTS_FOR_A_ZERO = 4


def layer_key(case: MoECase) -> str:
    """What the numbers of a layer depend on: not its file format, batch, routing, bias or activation scales.

    Compressed-tensors, Quark and raw checkpoints of one scheme therefore hold the same codes and scales, and so do
    plain checkpoints of one dtype whether or not they are quantized online.
    """
    scheme = f"{case.weight}-{case.weight_scale}" if case.origin is Origin.PREQUANTIZED else f"{case.dtype}"
    halves = "gated" if case.activation.gated else "single"
    return f"{scheme}-{halves}-e{case.experts}h{case.hidden}i{case.intermediate}-s{case.seed}"


def zero_expert(case: MoECase) -> int | None:
    """The expert whose weights are all zero, in every second layer with enough experts; never the last."""
    draw = int.from_bytes(hashlib.sha256(f"{layer_key(case)} zero expert".encode()).digest()[:8], "little")
    if case.experts < _MIN_EXPERTS_FOR_A_ZERO or draw % 2:
        return None
    return draw // 2 % (case.experts - 1)


def empty_expert(case: MoECase) -> int | None:
    """The expert with no tokens: never the last, never the zero expert; None when E < k + 2."""
    if case.experts < case.top_k + 2:
        return None
    candidates = [expert for expert in range(case.experts - 1) if expert != zero_expert(case)]
    return candidates[(case.tokens + case.seed) % len(candidates)]


def tensor_scaled(case: MoECase) -> bool:
    """True when one activation scale covers all tokens, so that a small token has few codes left."""
    return case.act_scale in (ActScale.STATIC_TENSOR, ActScale.DYNAMIC_TENSOR)
