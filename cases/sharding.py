"""One rank's part of a checkpoint, as a checkpoint of a smaller layer: tensors are cut along the intermediate size, none is changed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from cases.checkpoint import Checkpoint
from cases.shards import whole_groups
from references.vocabulary import Layout

if TYPE_CHECKING:
    from cases.case import MoECase
    from cases.shards import Shard

_K_FIRST = ("qweight", "qzeros", "scales")  # GPTQ and AWQ: rows of a tensor are columns of the weight
_UNCUT = ("input_scale", "weight_scale_2", "weight_global_scale", "input_global_scale")


def slice_of(case: MoECase, checkpoint: Checkpoint, shard: Shard) -> tuple[MoECase, Checkpoint]:
    """The case with the shard's intermediate size, and its checkpoint. Biases of the down projection stay whole on every rank.

    Raises:
        ValueError: a group of scales would be cut.
    """
    if not whole_groups(case, shard.ranks):
        raise ValueError(f"{case.intermediate} / {shard.ranks} columns are no whole groups of {case.weight_scale.width}")
    tensors = {name: _cut(case, name, tensor, shard) for name, tensor in checkpoint.tensors.items()}
    return replace(case, intermediate=case.intermediate // shard.ranks), replace(checkpoint, tensors=tensors)


def _cut(case: MoECase, name: str, tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    stem, _, kind = name.rpartition(".")
    if not stem:
        return _stacked(name, tensor, shard)
    down = stem.endswith("down_proj")
    if kind == "weight_shape":
        return torch.tensor([int(tensor[0]), int(tensor[1]) // shard.ranks] if down else [int(tensor[0]) // shard.ranks, int(tensor[1])])
    if kind == "g_idx":
        return _part(tensor, 0, shard) - tensor[shard.rank * tensor.shape[0] // shard.ranks] if down else tensor
    per_row = case.weight_scale in (Layout.TENSOR, Layout.CHANNEL)
    scale = kind in ("weight_scale", "weight_scale_inv", "scales", "weight_zero_point", "qzeros")
    if kind in _UNCUT or (scale and case.weight_scale is Layout.TENSOR) or (down and (kind == "bias" or (scale and per_row))):
        return tensor
    return _part(tensor, int(down) ^ int(kind in _K_FIRST), shard)


def _stacked(name: str, tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Tensors of all experts: rows of gate and up in turn are cut as they lie."""
    if name.startswith("gate_up_proj"):
        return _part(tensor, 1, shard)
    return tensor if name == "down_proj_bias" else _part(tensor, 2, shard)


def _part(tensor: torch.Tensor, dim: int, shard: Shard) -> torch.Tensor:
    size = tensor.shape[dim] // shard.ranks
    return tensor.narrow(dim, shard.rank * size, size).clone()
