"""Checkpoint tensors -> experts, for every naming convention. Nothing is computed here: bytes are named, shaped and checked.

Per expert ``{e}.gate_proj`` (gated layers only), ``{e}.up_proj``, ``{e}.down_proj``, each with ``.weight`` [N, K] and, where the layer is
quantized, a scale that multiplies the decoded codes:

- compressed-tensors: ``.weight_scale``, channel [N, 1], tensor [1], block [ceil(N/128), ceil(K/128)]
- Quark: ``.weight_scale``, channel [N], tensor [] or [1]
- vLLM's own fp8: ``.weight_scale`` per tensor, ``.weight_scale_inv`` per block (named inverse, multiplies all the same)
- raw: ``.weight_scale``, any of these shapes

Static activation scales are ``.input_scale`` ([] or [1]), biases ``.bias`` [N]. ModelOpt's FP8 is as vLLM's own. Packed and microscaled
formats: references/checkpoint_packed.py. Interleaved activations: all experts in one tensor, see ``_read_interleaved``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from references.checkpoint_packed import get, is_packed, read_gpt_oss, read_projection
from references.formats import torch_dtype
from references.moe import Expert, Projection
from references.scales import scale_shape
from references.vocabulary import CheckpointFormat, Format, Layout


def _scale_name(checkpoint: CheckpointFormat, layout: Layout) -> str:
    inverse = checkpoint is CheckpointFormat.VLLM_FP8 and layout is Layout.BLOCK128
    return "weight_scale_inv" if inverse else "weight_scale"


def _reshaped(tensor: torch.Tensor, shape: tuple[int, ...], name: str) -> torch.Tensor:
    squeezed = tuple(size for size in tensor.shape if size != 1)
    if squeezed != tuple(size for size in shape if size != 1):
        raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
    return tensor.to(torch.float32).reshape(shape)


def _projection(
    tensors: Mapping[str, torch.Tensor], prefix: str, checkpoint: CheckpointFormat, weight: Format, layout: Layout
) -> Projection:
    codes = get(tensors, f"{prefix}.weight")
    if codes.dtype is not torch_dtype(weight):
        raise ValueError(f"{prefix}.weight is {codes.dtype}, a {weight} checkpoint holds {torch_dtype(weight)}")
    rows, cols = codes.shape
    scale = None
    if layout is not Layout.NONE:
        name = f"{prefix}.{_scale_name(checkpoint, layout)}"
        scale = _reshaped(get(tensors, name), scale_shape(layout, rows, cols), name)
    input_scale = tensors.get(f"{prefix}.input_scale")
    bias = tensors.get(f"{prefix}.bias")
    return Projection(
        codes=codes,
        format=weight,
        layout=layout,
        scale=scale,
        input_scale=None if input_scale is None else _reshaped(input_scale, (), f"{prefix}.input_scale"),
        bias=bias if bias is None else bias.reshape(rows),
    )


def read_experts(
    tensors: Mapping[str, torch.Tensor], *, checkpoint: CheckpointFormat, experts: int, gated: bool, weight: Format, layout: Layout
) -> tuple[Expert, ...]:
    """One Expert per index, in order. ``weight`` is the format on disk; ``layout`` that of its scales, NONE where there are none.

    Raises:
        ValueError: for a missing tensor, a wrong dtype or a shape that is not the layout's; the message names the tensor.
    """
    if checkpoint is CheckpointFormat.GPT_OSS:
        return read_gpt_oss(tensors, experts)
    if "gate_up_proj" in tensors:
        return _read_interleaved(tensors, experts, weight)
    read = read_projection if is_packed(checkpoint, weight, layout, tensors) else _projection
    return tuple(
        Expert(
            gate=read(tensors, f"{e}.gate_proj", checkpoint, weight, layout) if gated else None,
            up=read(tensors, f"{e}.up_proj", checkpoint, weight, layout),
            down=read(tensors, f"{e}.down_proj", checkpoint, weight, layout),
        )
        for e in range(experts)
    )


def _read_interleaved(tensors: Mapping[str, torch.Tensor], experts: int, weight: Format) -> tuple[Expert, ...]:
    """``gate_up_proj`` [E, 2I, H], gate and up rows in turn, and ``down_proj`` [E, H, I], unquantized."""
    both, down = get(tensors, "gate_up_proj", torch_dtype(weight)), get(tensors, "down_proj", torch_dtype(weight))

    def projection(codes: torch.Tensor) -> Projection:
        return Projection(codes=codes, format=weight, layout=Layout.NONE)

    return tuple(Expert(gate=projection(both[e, ::2]), up=projection(both[e, 1::2]), down=projection(down[e])) for e in range(experts))
