"""How packed codes, zero points and scales lie in a loaded layer before a backend's conversion, element by element.

vLLM 0.33.0 keeps them as the file has them, or turned so that rows of the weight come first (``auto_gptq.py``,
``compressed_tensors_moe_wna16.py``), or as bytes (``moe_wna16.py``). For one expert, N rows, K columns, G groups, ``p`` codes to a word:

    codes        int32 [N, K/p] or [K/p, N], first column lowest · AWQ int32 [K, N/p] · uint8 [N, K/2], even column low · uint8 [N, K]
    zero points  int32 [N/p, G], first row lowest · AWQ int32 [G, N/p] · uint8 [N/2, G], even row low · uint8 [N, G]
    scales       [N, G] or [G, N]

Which one it is, dtype and shape say; whether words are in AWQ's order, the file.
"""

from __future__ import annotations

import torch

from references.packing import AWQ_ORDER

_WORD = 32


def codes(held: torch.Tensor, bits: int, rows: int, columns: int, *, awq: bool = False) -> torch.Tensor:
    """[N, K] int64, unsigned codes of ``bits`` bits. Raises ValueError for a form that is none of these."""
    per_word, shape = _WORD // bits, tuple(held.shape)
    n, k = torch.arange(rows).unsqueeze(1), torch.arange(columns).unsqueeze(0)
    if held.dtype is torch.int32 and not awq and shape == (rows, columns // per_word):
        return _field(held[n, k // per_word], k % per_word, bits)
    if held.dtype is torch.int32 and not awq and shape == (columns // per_word, rows):
        return _field(held[k // per_word, n], k % per_word, bits)
    if held.dtype is torch.int32 and awq and shape == (columns, rows // per_word):
        return _field(held[k, n // per_word], _awq(n, per_word), bits)
    if held.dtype is torch.uint8 and bits == 4 and shape == (rows, columns // 2):
        return _field(held[n, k // 2], k % 2, bits)
    if held.dtype is torch.uint8 and bits == 8 and shape == (rows, columns):
        return held.long()
    raise ValueError(f"{list(shape)} {held.dtype} holds no {rows} x {columns} codes of {bits} bits in a form that is known")


def zero_points(held: torch.Tensor, bits: int, rows: int, groups: int, *, awq: bool = False) -> torch.Tensor:
    """[N, G] int64. Raises ValueError for a form that is none of these."""
    per_word, shape = _WORD // bits, tuple(held.shape)
    n, g = torch.arange(rows).unsqueeze(1), torch.arange(groups).unsqueeze(0)
    if held.dtype is torch.int32 and not awq and shape == (rows // per_word, groups):
        return _field(held[n // per_word, g], n % per_word, bits)
    if held.dtype is torch.int32 and awq and shape == (groups, rows // per_word):
        return _field(held[g, n // per_word], _awq(n, per_word), bits)
    if held.dtype is torch.uint8 and bits == 4 and shape == (rows // 2, groups):
        return _field(held[n // 2, g], n % 2, bits)
    if held.dtype is torch.uint8 and bits == 8 and shape == (rows, groups):
        return held.long()
    raise ValueError(f"{list(shape)} {held.dtype} holds no {rows} x {groups} zero points of {bits} bits in a form that is known")


def scales(held: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """[N, G], in the dtype they are held in. Raises ValueError for another shape."""
    if held.dim() != 2 or tuple(held.shape) not in ((rows, groups), (groups, rows)):
        raise ValueError(f"{list(held.shape)} holds no {rows} x {groups} scales")
    return held if tuple(held.shape) == (rows, groups) else held.T


def _field(words: torch.Tensor, place: torch.Tensor, bits: int) -> torch.Tensor:
    """The code at ``place`` of each word, counted from its lowest bits."""
    return words.long() >> place * bits & (1 << bits) - 1


def _awq(index: torch.Tensor, per_word: int) -> torch.Tensor:
    """Where a word of AWQ's order holds the code of that index."""
    position = torch.tensor([AWQ_ORDER.index(i) for i in range(per_word)])
    return position[index % per_word]
