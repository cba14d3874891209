"""Checkpoints: named tensors exactly as on disk, and the quantization config that would stand beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One MoE layer on disk.

    tensors: ``"{e}.gate_proj.weight"`` (gated only), ``"{e}.up_proj.weight"``, ``"{e}.down_proj.weight"`` with
        ``.weight_scale`` / ``.weight_scale_inv`` / ``.input_scale`` / ``.bias`` beside them, as the format names them.
    quantization_config: what config.json holds under that key; None when the checkpoint is not quantized.
    """

    tensors: dict[str, torch.Tensor]
    quantization_config: dict[str, Any] | None
