"""Packed and microscaled projections as tensors on disk; the names and shapes that references/checkpoint_packed.py lists."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cases import packed
from references.checkpoint_packed import BITS, MIDDLE
from references.formats import round_to
from references.packing import AWQ_ORDER, pack_nibbles, pack_words
from references.vocabulary import CheckpointFormat, Format, Layout

if TYPE_CHECKING:
    from cases.case import MoECase
    from references.moe import Expert, Projection

_TORCH = {Format.BF16: torch.bfloat16, Format.FP16: torch.float16}


def write_projection(case: MoECase, prefix: str, projection: Projection, tensors: dict[str, torch.Tensor]) -> None:
    """Adds the projection's tensors."""
    assert projection.scale is not None
    if case.weight in packed.INTEGERS:
        _integers(case, prefix, projection, projection.scale, tensors)
    else:
        _floats(case, prefix, projection, projection.scale, tensors)
    if projection.bias is not None:
        tensors[f"{prefix}.bias"] = projection.bias


def _integers(case: MoECase, prefix: str, projection: Projection, scale: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    bits = BITS[case.weight]
    codes = projection.codes.to(torch.int64) + MIDDLE.get(case.weight, 0)
    points = projection.zero_point
    scale = scale.to(_TORCH[case.dtype])
    match case.checkpoint:
        case CheckpointFormat.GPTQ:
            tensors[f"{prefix}.qweight"] = pack_words(codes.T, bits, 0)
            stored = torch.full_like(scale, MIDDLE.get(case.weight, 0), dtype=torch.int64) if points is None else points.to(torch.int64)
            tensors[f"{prefix}.qzeros"] = pack_words(stored.T - 1, bits, 1)
            tensors[f"{prefix}.scales"] = scale.T.contiguous()
            width = case.weight_scale.width or codes.shape[1]
            tensors[f"{prefix}.g_idx"] = (torch.arange(codes.shape[1]) // width).to(torch.int32)
        case CheckpointFormat.AWQ:
            assert points is not None
            tensors[f"{prefix}.qweight"] = pack_words(codes.T, bits, 1, AWQ_ORDER)
            tensors[f"{prefix}.qzeros"] = pack_words(points.T, bits, 1, AWQ_ORDER)
            tensors[f"{prefix}.scales"] = scale.T.contiguous()
        case _:
            tensors[f"{prefix}.weight_packed"] = pack_words(codes, bits, 1)
            tensors[f"{prefix}.weight_scale"] = scale
            tensors[f"{prefix}.weight_shape"] = torch.tensor(codes.shape, dtype=torch.int64)
            if points is not None:
                tensors[f"{prefix}.weight_zero_point"] = pack_words(points, bits, 0)


def scale_bytes(case: MoECase, scale: torch.Tensor) -> torch.Tensor:
    """Scales in their own format: E8M0 as uint8, E4M3 as itself."""
    if packed.scale_format(case) is Format.E4M3FN:
        return scale.to(torch.float8_e4m3fn)
    return (torch.frexp(scale).exponent + 126).to(torch.uint8)


def _floats(case: MoECase, prefix: str, projection: Projection, scale: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    ct = case.checkpoint is CheckpointFormat.COMPRESSED_TENSORS
    if case.weight is Format.E2M1:
        tensors[f"{prefix}.weight_packed" if ct else f"{prefix}.weight"] = pack_nibbles(projection.codes)
    else:
        tensors[f"{prefix}.weight"] = projection.codes
    tensors[f"{prefix}.weight_scale"] = scale_bytes(case, scale)
    if case.weight_scale is not Layout.GROUP16:
        return
    whole, given = projection.global_scale, projection.input_scale
    assert whole is not None
    if ct:  # global scales divide
        tensors[f"{prefix}.weight_global_scale"] = _reciprocal(whole)
        if given is not None:
            tensors[f"{prefix}.input_global_scale"] = _reciprocal(given)
    else:
        tensors[f"{prefix}.weight_scale_2"] = whole
        if given is not None:
            tensors[f"{prefix}.input_scale"] = given


def _reciprocal(x: torch.Tensor) -> torch.Tensor:
    return round_to(1.0 / x.to(torch.float64), Format.FP32).to(torch.float32).reshape(1)


def write_gpt_oss(case: MoECase, experts: tuple[Expert, ...]) -> dict[str, torch.Tensor]:
    """All experts of a projection in one tensor, gate and up rows in turn."""
    tensors: dict[str, torch.Tensor] = {}
    for name in ("gate_up_proj", "down_proj"):
        parts = [[e.gate, e.up] if name == "gate_up_proj" else [e.down] for e in experts]
        stacked = [[part for part in halves if part is not None] for halves in parts]

        def rows(tensors_of: list[list[torch.Tensor]]) -> torch.Tensor:
            return torch.stack([torch.stack(halves, 1).flatten(0, 1) for halves in tensors_of])

        blocks = rows([[pack_nibbles(part.codes) for part in halves] for halves in stacked])
        tensors[f"{name}_blocks"] = blocks.unflatten(2, (-1, 16))
        scales = [[scale_bytes(case, part.scale) for part in halves if part.scale is not None] for halves in stacked]
        tensors[f"{name}_scales"] = rows(scales)
        if case.bias:
            tensors[f"{name}_bias"] = rows([[part.bias for part in halves if part.bias is not None] for halves in stacked])
    return tensors
