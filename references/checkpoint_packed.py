"""Packed and microscaled checkpoint tensors -> projections. As references/checkpoint.py: bytes are named, shaped, checked and unpacked.

Per expert and projection, K the columns of the weight, G its groups:

- compressed-tensors integers: ``.weight_packed`` int32 [N, K/8 or K/4], ``.weight_scale`` [N, G], asymmetric: ``.weight_zero_point`` int32
  [N/8 or N/4, G] packed along N; symmetric codes are stored plus 8 or 128
- compressed-tensors E2M1: ``.weight_packed`` uint8 [N, K/2], ``.weight_scale`` uint8 E8M0 (MXFP4) or E4M3 (NVFP4) [N, G]; NVFP4 also
  ``.weight_global_scale`` and ``.input_global_scale``, which divide
- compressed-tensors, ModelOpt E4M3 with E8M0 scales (MXFP8): ``.weight``, ``.weight_scale`` uint8 [N, G]
- Quark E2M1: ``.weight`` uint8 [N, K/2], ``.weight_scale`` uint8 [N, G]
- ModelOpt NVFP4: ``.weight`` uint8 [N, K/2], ``.weight_scale`` E4M3 [N, G], ``.weight_scale_2`` and ``.input_scale``, which multiply
- GPTQ: ``.qweight`` int32 [K/8 or K/4, N], ``.scales`` [G, N], ``.qzeros`` int32 [G, N/8 or N/4] of zero points minus one, ``.g_idx`` [K]
- AWQ: ``.qweight`` int32 [K, N/8], ``.scales`` [G, N], ``.qzeros`` int32 [G, N/8], both in AWQ's order
- gpt-oss: all experts in one, ``gate_up_proj_blocks`` uint8 [E, 2I, G, 16] with gate and up rows in turn, ``gate_up_proj_scales`` uint8
  [E, 2I, G], ``gate_up_proj_bias`` [E, 2I], and the same of ``down_proj``
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from references.formats import decode, round_to, torch_dtype
from references.moe import Expert, Projection
from references.packing import AWQ_ORDER, unpack_nibbles, unpack_words
from references.vocabulary import CheckpointFormat, Format, Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

BITS = {Format.INT4: 4, Format.UINT4: 4, Format.INT8: 8, Format.UINT8: 8}
MIDDLE = {Format.INT4: 8, Format.INT8: 128}  # symmetric codes are stored plus this


def get(tensors: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The tensor of that name.

    Raises:
        ValueError: it is missing, or of another dtype.
    """
    if name not in tensors:
        raise ValueError(f"the checkpoint has no tensor {name!r}")
    if dtype is not None and tensors[name].dtype is not dtype:
        raise ValueError(f"{name} is {tensors[name].dtype}, expected {dtype}")
    return tensors[name]


def is_packed(checkpoint: CheckpointFormat, weight: Format, layout: Layout, names: Mapping[str, torch.Tensor]) -> bool:
    """Whether these tensors are read here."""
    return (
        weight in (Format.INT4, Format.UINT4, Format.UINT8, Format.E2M1)
        or layout in (Layout.GROUP16, Layout.GROUP32, Layout.GROUP64, Layout.GROUP128)
        or (checkpoint is CheckpointFormat.COMPRESSED_TENSORS and "0.up_proj.weight_packed" in names)
    )


def read_projection(
    tensors: Mapping[str, torch.Tensor], prefix: str, checkpoint: CheckpointFormat, weight: Format, layout: Layout
) -> Projection:
    """One projection.

    Raises:
        ValueError: a missing tensor, a wrong dtype, or groups that are not the layout's; the message names the tensor.
    """
    if weight in BITS:
        codes, scale, zero_point = _integers(tensors, prefix, checkpoint, weight)
        scale = scale.to(torch.float32)
        whole = given = None
    else:
        codes, scale = _floats(tensors, prefix, checkpoint, weight, layout)
        zero_point = None
        whole, given = _globals(tensors, prefix, checkpoint) if layout is Layout.GROUP16 else (None, None)
    rows, columns = codes.shape
    width = layout.width or columns
    if tuple(scale.shape) != (rows, columns // width):
        raise ValueError(f"the scales of {prefix} have shape {list(scale.shape)}, expected {[rows, columns // width]}")
    bias = tensors.get(f"{prefix}.bias")
    return Projection(
        codes=codes,
        format=weight,
        layout=layout,
        scale=scale,
        input_scale=given,
        bias=None if bias is None else bias.reshape(rows),
        zero_point=zero_point,
        global_scale=whole,
    )


def _integers(
    tensors: Mapping[str, torch.Tensor], prefix: str, checkpoint: CheckpointFormat, weight: Format
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes [N, K], scales [N, G], zero points [N, G] or None."""
    bits = BITS[weight]
    asymmetric = weight.has_zero_point
    match checkpoint:
        case CheckpointFormat.GPTQ:
            codes = unpack_words(get(tensors, f"{prefix}.qweight", torch.int32), bits, 0).T
            scale = get(tensors, f"{prefix}.scales").T
            stored = unpack_words(get(tensors, f"{prefix}.qzeros", torch.int32), bits, 1).T
            zero_point = stored + 1 if asymmetric else None
        case CheckpointFormat.AWQ:
            codes = unpack_words(get(tensors, f"{prefix}.qweight", torch.int32), bits, 1, AWQ_ORDER).T
            scale = get(tensors, f"{prefix}.scales").T
            zero_point = unpack_words(get(tensors, f"{prefix}.qzeros", torch.int32), bits, 1, AWQ_ORDER).T
        case _:
            codes = unpack_words(get(tensors, f"{prefix}.weight_packed", torch.int32), bits, 1)
            scale = get(tensors, f"{prefix}.weight_scale")
            zero_point = unpack_words(get(tensors, f"{prefix}.weight_zero_point", torch.int32), bits, 0) if asymmetric else None
    if not asymmetric:
        codes = (codes.to(torch.int16) - MIDDLE[weight]).to(torch_dtype(weight))
    return codes.contiguous(), scale.contiguous(), None if zero_point is None else zero_point.contiguous()


def _floats(
    tensors: Mapping[str, torch.Tensor], prefix: str, checkpoint: CheckpointFormat, weight: Format, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] and scales [N, G] float32."""
    ct = checkpoint is CheckpointFormat.COMPRESSED_TENSORS
    if weight is Format.E2M1:
        codes = unpack_nibbles(get(tensors, f"{prefix}.weight_packed" if ct else f"{prefix}.weight", torch.uint8))
    else:
        codes = get(tensors, f"{prefix}.weight", torch_dtype(weight))
    kind = Format.E4M3FN if layout is Layout.GROUP16 else Format.E8M0
    return codes, decode(get(tensors, f"{prefix}.weight_scale", torch_dtype(kind)), kind).to(torch.float32)


def _globals(tensors: Mapping[str, torch.Tensor], prefix: str, checkpoint: CheckpointFormat) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The global scales of weights and of activations, float32 [], both as multipliers."""
    if checkpoint is CheckpointFormat.COMPRESSED_TENSORS:
        whole, given = get(tensors, f"{prefix}.weight_global_scale", torch.float32), tensors.get(f"{prefix}.input_global_scale")
        return _reciprocal(whole), None if given is None else _reciprocal(given)
    given = tensors.get(f"{prefix}.input_scale")
    return get(tensors, f"{prefix}.weight_scale_2", torch.float32).reshape(()), None if given is None else given.reshape(())


def _reciprocal(x: torch.Tensor) -> torch.Tensor:
    """1 / x in fp32, []."""
    return round_to(1.0 / x.reshape(()).to(torch.float64), Format.FP32).to(torch.float32)


def read_gpt_oss(tensors: Mapping[str, torch.Tensor], experts: int) -> tuple[Expert, ...]:
    """Every expert of gpt-oss's stacked tensors."""

    def projection(name: str, expert: int, rows: slice) -> Projection:
        blocks = get(tensors, f"{name}_blocks", torch.uint8)[expert, rows].flatten(1)
        scale = decode(get(tensors, f"{name}_scales", torch.uint8)[expert, rows], Format.E8M0).to(torch.float32)
        bias = tensors[f"{name}_bias"][expert, rows] if f"{name}_bias" in tensors else None
        return Projection(codes=unpack_nibbles(blocks), format=Format.E2M1, layout=Layout.GROUP32, scale=scale, bias=bias)

    return tuple(
        Expert(
            gate=projection("gate_up_proj", e, slice(0, None, 2)),
            up=projection("gate_up_proj", e, slice(1, None, 2)),
            down=projection("down_proj", e, slice(None)),
        )
        for e in range(experts)
    )
