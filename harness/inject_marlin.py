"""What Marlin's kernels make of biases and scales that were not laid out for them.

Sources: vLLM 0.33.0, ``marlin_utils.py::marlin_permute_bias``, which dense layers call and ``prepare_fp8_moe_layer_for_marlin`` does not;
``get_scale_perms`` there, one order for scales of groups and one for scales of whole channels, and ``oracle/int_wna16.py``, which chooses
w13's by the size of w2.
"""

from __future__ import annotations

import torch

from references.vocabulary import Format

_ORDER = tuple(2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25))  # place p of 32 holds channel _ORDER[p]
_GROUP_ORDER = tuple(i + 8 * j for i in range(8) for j in range(8))  # place p of 64 holds the group scales of channel _GROUP_ORDER[p]
_VIEW = {Format.BF16: torch.bfloat16, Format.FP16: torch.float16}


def unpermuted(bias: torch.Tensor, halves: int) -> torch.Tensor:
    """[N] as each channel gets it: the bias at the place where its own would be. Each half is padded with zeros to whole tiles of 32."""
    return torch.cat([_half(half) for half in bias.chunk(halves)])


def _half(bias: torch.Tensor) -> torch.Tensor:
    places = torch.nn.functional.pad(bias, (0, -bias.shape[0] % 32)).reshape(-1, 32)
    got = torch.empty_like(places)
    got[:, list(_ORDER)] = places
    return got.flatten()[: bias.shape[0]]


def in_order_of_channels(scale: torch.Tensor) -> torch.Tensor:
    """[N, G] as each channel gets it: laid out in the order of channel scales, read in that of groups'. Padded to whole tiles of 64."""
    tiles = torch.nn.functional.pad(scale, (0, 0, 0, -scale.shape[0] % 64)).reshape(-1, 64, scale.shape[1])
    got = torch.empty_like(tiles)
    got[:, list(_GROUP_ORDER)] = tiles[:, [32 * tile + channel for tile in (0, 1) for channel in _ORDER]]
    return got.flatten(0, 1)[: scale.shape[0]]


def in_order_of_groups(scale: torch.Tensor) -> torch.Tensor:
    """[N, 1] as each channel gets it: laid out in the order of group scales, read in that of channels'. Padded to whole tiles of 64."""
    tiles = torch.nn.functional.pad(scale, (0, 0, 0, -scale.shape[0] % 64)).reshape(-1, 64, scale.shape[1])
    got = torch.empty_like(tiles)
    got[:, [32 * tile + channel for tile in (0, 1) for channel in _ORDER]] = tiles[:, list(_GROUP_ORDER)]
    return got.flatten(0, 1)[: scale.shape[0]]


def read_as_16_bits(biases: torch.Tensor, expert: int, fmt: Format) -> torch.Tensor:
    """[N] float64: float32 ``biases`` [E, N] read as if they were of ``fmt``, little-endian, expert ``expert``'s N of them."""
    size = biases.shape[1]
    halves = biases.to(torch.float32).contiguous().view(_VIEW[fmt]).flatten()
    return halves[expert * size : (expert + 1) * size].to(torch.float64)
