"""A checkpoint as a directory: config.json, safetensors shards and their index, one tensor per expert or experts stacked."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from harness.subject.loading import Depth

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from cases.case import MoECase
    from cases.checkpoint import Checkpoint

PREFIX = "model.layers.0.mlp.experts"
SHARDS = 3


def write_directory(folder: Path, case: MoECase, checkpoint: Checkpoint, config: Mapping[str, Any], depth: Depth) -> None:
    """Tensors are dealt to shards in turn, from the last: an expert's codes and scales lie apart, in no order of theirs."""
    from safetensors.torch import save_file

    quantization = checkpoint.quantization_config
    described = dict(config) if quantization is None else {**config, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(described))
    tensors = stacked(case, checkpoint.tensors) if depth is Depth.STACKED else checkpoint.tensors
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(min(SHARDS, len(tensors)))]
    for turn, (name, tensor) in enumerate(reversed(tensors.items())):
        shards[turn % len(shards)][f"{PREFIX}.{name}"] = tensor.contiguous()
    names = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    index = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def stacked(case: MoECase, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``gate_up_proj`` [E, 2*I, H] (gate rows first; ``up_proj`` [E, I, H] without a gate) and ``down_proj`` [E, H, I], scales likewise."""
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in tensors)
    first = ("gate_proj", "up_proj") if case.activation.gated else ("up_proj",)
    made = {}
    for name, projections in (("gate_up_proj" if len(first) == 2 else "up_proj", first), ("down_proj", ("down_proj",))):
        for kind in kinds:
            rows = [torch.cat([tensors[f"{e}.{projection}.{kind}"].cpu() for projection in projections]) for e in range(case.experts)]
            made[f"{name}{kind.removeprefix('weight')}"] = torch.stack(rows)
    return made
