"""Checkpoints: named tensors exactly as on disk, and the quantization config that would stand beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cases.axes import Data, Origin
from cases.checkpoint_packed import write_gpt_oss, write_projection
from cases.configs import quantization_config
from cases.dense import dense_experts
from cases.lattice import lattice_experts
from cases.packed import is_packed
from references.vocabulary import CheckpointFormat, Layout

if TYPE_CHECKING:
    from cases.case import MoECase
    from references.moe import Expert, Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One MoE layer on disk.

    tensors: ``"{e}.gate_proj.weight"`` (gated only), ``"{e}.up_proj.weight"``, ``"{e}.down_proj.weight"`` with
        ``.weight_scale`` / ``.weight_scale_inv`` / ``.input_scale`` / ``.bias`` beside them, as the format names them. Packed and
        microscaled formats: the names of references/checkpoint_packed.py.
    quantization_config: what config.json holds under that key; None when the checkpoint is not quantized.
    """

    tensors: dict[str, torch.Tensor]
    quantization_config: dict[str, Any] | None


def make_checkpoint(case: MoECase) -> Checkpoint:
    """The case's layer, bit-identical on every machine.

    Raises:
        InvalidCase: for sizes the lattice is not laid out for.
    """
    return write(case, lattice_experts(case) if case.data is Data.LATTICE else dense_experts(case))


def write(case: MoECase, experts: tuple[Expert, ...]) -> Checkpoint:
    """Experts in the case's checkpoint format: names, shapes and config of vLLM 0.33.0's readers of that format."""
    if case.checkpoint is CheckpointFormat.GPT_OSS:
        return Checkpoint(tensors=write_gpt_oss(case, experts), quantization_config=quantization_config(case))
    if case.activation.interleaved:
        return Checkpoint(tensors=write_interleaved(experts), quantization_config=None)
    tensors: dict[str, torch.Tensor] = {}
    for index, expert in enumerate(experts):
        for name, projection in (("gate_proj", expert.gate), ("up_proj", expert.up), ("down_proj", expert.down)):
            if projection is not None:
                _write_projection(case, f"{index}.{name}", projection, tensors)
    return Checkpoint(tensors=tensors, quantization_config=quantization_config(case))


def write_interleaved(experts: tuple[Expert, ...]) -> dict[str, torch.Tensor]:
    """Hidden-dtype weights of all experts in one tensor: ``gate_up_proj`` [E, 2I, H], gate and up rows in turn; ``down_proj`` [E, H, I]."""
    rows = [torch.stack((e.gate.codes, e.up.codes), 1).flatten(0, 1) for e in experts if e.gate is not None]
    return {"gate_up_proj": torch.stack(rows), "down_proj": torch.stack([e.down.codes for e in experts])}


def _write_projection(case: MoECase, prefix: str, projection: Projection, tensors: dict[str, torch.Tensor]) -> None:
    if case.origin is Origin.PREQUANTIZED and is_packed(case):
        write_projection(case, prefix, projection, tensors)
        return
    tensors[f"{prefix}.weight"] = projection.codes
    if projection.scale is not None:
        block = case.weight_scale is Layout.BLOCK128
        name = "weight_scale_inv" if block and case.checkpoint is CheckpointFormat.VLLM_FP8 else "weight_scale"
        tensors[f"{prefix}.{name}"] = projection.scale.reshape(_disk_shape(case, projection.scale))
    if projection.input_scale is not None:
        ct = case.checkpoint is CheckpointFormat.COMPRESSED_TENSORS
        tensors[f"{prefix}.input_scale"] = projection.input_scale.reshape((1,) if ct else ())
    if projection.bias is not None:
        tensors[f"{prefix}.bias"] = projection.bias


def _disk_shape(case: MoECase, scale: torch.Tensor) -> tuple[int, ...]:
    """compressed-tensors: tensor (1,), channel (N, 1). Quark: tensor (), channel (N,). vLLM's fp8 and raw: (), (N, 1)."""
    if case.weight_scale is Layout.TENSOR and case.checkpoint is CheckpointFormat.COMPRESSED_TENSORS:
        return (1,)
    if case.weight_scale is Layout.CHANNEL and case.checkpoint is CheckpointFormat.QUARK:
        return (scale.shape[0],)
    return tuple(scale.shape)
