"""Where Humming keeps a code and a scale once its GEMM's layout is made, for tensor cores of 16-bit activations and narrower.

humming-kernels 0.1.19, read in ``include/humming/kernel/process.cuh`` (weights: the comment above ``tmp`` names the indices) and in
``transform.py`` (scales). Each function here says where one element lies; nothing is permuted as a whole, which is how Humming does it.
"""

from __future__ import annotations

import torch

TILE = 64  # rows and columns that one group of 32 threads takes apart


def weight_codes(
    words: torch.Tensor, rows: int, columns: int, *, bits: int, activation_bits: int, interleaved: bool = True
) -> torch.Tensor:
    """Codes of B ``bits``, int64 [E, rows, columns], out of int32 words [E, K * A / 256, N * B * 8 / A]; K, N: as padded.

    interleaved: the codes of one operand register lie 32 / A apart in a word.

    Raises:
        ValueError: for words that cannot hold so many codes.
    """
    a, per_word = activation_bits, 32 // bits
    n, k = torch.arange(rows).unsqueeze(1), torch.arange(columns).unsqueeze(0)
    eight, j = n % TILE // 8, k % TILE // (128 // a)
    i1, i2, i3, i4, i5, i6 = j // 2, eight // (a // 2), eight % (a // 2) // 2, eight % 2, j % 2, k % (32 // a)
    thread = n % 8 * 4 + k % (128 // a) // (32 // a)
    value = ((i3 * 2 + i4) * 2 + i5) * (32 // a) + i6
    row = k // TILE * (a // 4) + i1
    column = ((n // TILE * (16 // a) + i2) * 32 + thread) * bits + value // per_word
    place = value % per_word
    if interleaved:
        stride = 32 // a
        place = place % stride * (per_word // stride) + place // stride
    if words.dim() != 3 or int(row.max()) >= words.shape[1] or int(column.max()) >= words.shape[2]:
        raise ValueError(f"{list(words.shape)} words cannot hold {rows} x {columns} codes of {bits} bits")
    return words.long()[:, row, column] >> place * bits & (1 << bits) - 1


def column_scales(scales: torch.Tensor, rows: int, *, on_result: bool) -> torch.Tensor:
    """Scales [E, rows, G] out of [E, G, N], in which the rows of 64 are dealt out to threads.

    on_result: the scale multiplies the GEMM's result and lies as the result's columns do; otherwise as the weight's rows do.
    """
    n = torch.arange(rows)
    if on_result:  # a thread holds two neighbours of each 8
        place = n // 32 * 32 + n % 8 // 2 * 8 + n % 32 // 8 * 2 + n % 2
    else:  # a thread holds one of each 8
        place = n // TILE * TILE + n % 8 * 8 + n % TILE // 8
    return scales.transpose(-1, -2)[:, place]
