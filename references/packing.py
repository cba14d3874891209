"""How codes of four and eight bits lie in bytes and words, per file format. Pure rearrangement: no value is changed.

Sources: OCP MX specification and NVFP4 (two E2M1 codes to a byte, the even column in the low nibble, along K);
compressed-tensors ``compressors/pack_quantized`` (int32, the first column in the lowest bits, along K; zero points along N);
AutoGPTQ ``qlinear`` (int32 along K with K first, zero points along N, stored minus one); AutoAWQ ``packing_utils.py`` (int32 along N,
columns of each eight in the order 0 2 4 6 1 3 5 7).
"""

from __future__ import annotations

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # position i of a word, from its lowest bits up, holds column AWQ_ORDER[i] of eight


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] uint8 codes below 16 -> [N, K/2] uint8, the even column in the low nibble.

    Raises:
        ValueError: for an odd number of columns.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"two codes share a byte: K must be even, got {codes.shape[-1]}")
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., K/2] uint8 -> [..., K] uint8 codes below 16."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


def pack_words(codes: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[R, C] unsigned codes of ``bits`` bits -> int32 words of 32 / bits codes each, along ``dim``; the first in the lowest bits.

    order: position i of a word, from its lowest bits up, holds the code ``order[i]`` of its 32 / bits; None: in order.

    Raises:
        ValueError: when the codes of a row (or column) do not fill whole words.
    """
    per_word = 32 // bits
    lines = codes.to(torch.int64) if dim == 1 else codes.to(torch.int64).T
    if lines.shape[1] % per_word:
        raise ValueError(f"{per_word} codes share a word: size {lines.shape[1]} of dimension {dim} is no multiple")
    words = lines.reshape(lines.shape[0], -1, per_word)
    if order is not None:
        words = words[..., list(order)]
    shifts = torch.arange(per_word, dtype=torch.int64) * bits
    packed = (words << shifts).sum(-1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return (packed if dim == 1 else packed.T).flatten().view(packed.shape if dim == 1 else packed.T.shape)  # strides of its shape


def unpack_words(packed: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """The reverse of ``pack_words``: int32 words -> uint8 codes."""
    per_word = 32 // bits
    lines = packed.to(torch.int64) if dim == 1 else packed.to(torch.int64).T
    words: torch.Tensor = (lines.unsqueeze(-1) >> (torch.arange(per_word, dtype=torch.int64) * bits)) & (2**bits - 1)
    if order is not None:
        words = words[..., torch.tensor(order).argsort()]
    codes = words.flatten(1).to(torch.uint8)
    return (codes if dim == 1 else codes.T).contiguous()
