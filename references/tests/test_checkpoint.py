from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from references.checkpoint import read_experts
from references.vocabulary import CheckpointFormat, Format, Layout

N, K = 130, 200  # up and gate; down is its transpose


def checkpoint(scale_name: str | None, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.int8) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    counter = 1.0
    for e in range(2):
        for name, shape in (("gate_proj", (N, K)), ("up_proj", (N, K)), ("down_proj", (K, N))):
            tensors[f"{e}.{name}.weight"] = torch.full(shape, 1 + e).to(dtype)
            if scale_name is not None:
                scale = torch.empty(shapes[name])
                tensors[f"{e}.{name}.{scale_name}"] = scale.copy_(counter + torch.arange(scale.numel()).reshape(scale.shape))
                counter += scale.numel()
            tensors[f"{e}.{name}.input_scale"] = torch.tensor([counter])
    return tensors


CHANNEL2 = {"gate_proj": (N, 1), "up_proj": (N, 1), "down_proj": (K, 1)}
CHANNEL1 = {"gate_proj": (N,), "up_proj": (N,), "down_proj": (K,)}
ONE: dict[str, tuple[int, ...]] = {"gate_proj": (1,), "up_proj": (1,), "down_proj": (1,)}
NONE: dict[str, tuple[int, ...]] = {"gate_proj": (), "up_proj": (), "down_proj": ()}
BLOCK = {"gate_proj": (2, 2), "up_proj": (2, 2), "down_proj": (2, 2)}


@pytest.mark.parametrize(
    ("fmt", "name", "shapes", "layout", "canonical"),
    [
        (CheckpointFormat.COMPRESSED_TENSORS, "weight_scale", CHANNEL2, Layout.CHANNEL, (N, 1)),
        (CheckpointFormat.COMPRESSED_TENSORS, "weight_scale", ONE, Layout.TENSOR, ()),
        (CheckpointFormat.COMPRESSED_TENSORS, "weight_scale", BLOCK, Layout.BLOCK128, (2, 2)),
        (CheckpointFormat.QUARK, "weight_scale", CHANNEL1, Layout.CHANNEL, (N, 1)),
        (CheckpointFormat.QUARK, "weight_scale", NONE, Layout.TENSOR, ()),
        (CheckpointFormat.VLLM_FP8, "weight_scale", NONE, Layout.TENSOR, ()),
        (CheckpointFormat.VLLM_FP8, "weight_scale_inv", BLOCK, Layout.BLOCK128, (2, 2)),
        (CheckpointFormat.RAW, "weight_scale", CHANNEL2, Layout.CHANNEL, (N, 1)),
    ],
)
def test_every_convention_reads_the_same_experts(
    fmt: CheckpointFormat, name: str, shapes: Mapping[str, tuple[int, ...]], layout: Layout, canonical: tuple[int, ...]
) -> None:
    tensors = checkpoint(name, shapes)
    experts = read_experts(tensors, checkpoint=fmt, experts=2, gated=True, weight=Format.INT8, layout=layout)
    assert len(experts) == 2
    gate = experts[1].gate
    assert gate is not None
    assert gate.scale is not None
    assert gate.scale.shape == canonical
    assert torch.equal(gate.scale.flatten(), tensors[f"1.gate_proj.{name}"].flatten())
    assert gate.codes[0, 0] == 2
    assert experts[1].down.codes.shape == (K, N)
    assert gate.input_scale is not None
    assert gate.input_scale.shape == ()


def test_plain_and_non_gated() -> None:
    tensors = {"0.up_proj.weight": torch.ones(4, 3).bfloat16(), "0.down_proj.weight": torch.ones(3, 4).bfloat16()}
    tensors["0.up_proj.bias"] = torch.ones(4)
    (expert,) = read_experts(tensors, checkpoint=CheckpointFormat.PLAIN, experts=1, gated=False, weight=Format.BF16, layout=Layout.NONE)
    assert expert.gate is None
    assert expert.up.scale is None
    assert expert.up.bias is not None
    assert expert.down.bias is None


def test_what_is_wrong_is_named() -> None:
    tensors = checkpoint("weight_scale", CHANNEL2)
    read = {"checkpoint": CheckpointFormat.COMPRESSED_TENSORS, "gated": True, "weight": Format.INT8, "layout": Layout.CHANNEL}
    with pytest.raises(ValueError, match=r"no tensor '2\.gate_proj\.weight'"):
        read_experts(tensors, experts=3, **read)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"0\.gate_proj\.weight is torch.int8, a e4m3fn checkpoint holds torch.float8_e4m3fn"):
        read_experts(tensors, experts=2, **(read | {"weight": Format.E4M3FN}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"0\.gate_proj\.weight_scale has shape \[130, 1\], expected \[2, 2\]"):
        read_experts(tensors, experts=2, **(read | {"layout": Layout.BLOCK128}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no tensor '0\.gate_proj\.weight_scale_inv'"):
        read_experts(tensors, experts=2, **(read | {"checkpoint": CheckpointFormat.VLLM_FP8, "layout": Layout.BLOCK128}))  # type: ignore[arg-type]
