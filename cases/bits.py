"""Random numbers that are the same on every machine: SHAKE-256 of a text, then integer and IEEE arithmetic only.

Library generators differ between vectorised and scalar builds (normal draws) and between releases; a case's bytes may
not. Each tensor has its own text, so adding one reshuffles no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod

import torch

_BELL_TERMS = 4
_BELL_SPREAD = (_BELL_TERMS / 12) ** 0.5 * 65536  # standard deviation of a sum of 4 uniform 16-bit integers


def byte_strings(texts: Sequence[str], count: int) -> torch.Tensor:
    """[T, count] uint8, uniform: a row of each text."""
    rows = bytearray(b"".join(hashlib.shake_256(text.encode()).digest(count) for text in texts))
    return torch.frombuffer(rows, dtype=torch.uint8).view(len(texts), count)


def byte_string(text: str, count: int) -> torch.Tensor:
    """[count] uint8, uniform."""
    return byte_strings([text], count)[0]


def _words(texts: Sequence[str], count: int) -> torch.Tensor:
    return byte_strings(texts, 4 * count).view(torch.int32).to(torch.int64) + 2**31


def words(text: str, count: int) -> torch.Tensor:
    """[count] int64, uniform over 0 .. 2**32 - 1."""
    return _words([text], count)[0]


def bells(texts: Sequence[str], shape: tuple[int, ...]) -> torch.Tensor:
    """[T, *shape] float64, mean 0, variance 1, bell-shaped, never beyond 3.47: sums of four uniform draws."""
    draws = byte_strings(texts, 2 * _BELL_TERMS * prod(shape)).view(torch.int16).view(len(texts), _BELL_TERMS, *shape)
    total = draws.sum(1, dtype=torch.int64) * 2 + _BELL_TERMS  # centred: a signed draw has mean -1/2
    return total.to(torch.float64).div_(2 * _BELL_SPREAD)


def bell(text: str, shape: tuple[int, ...]) -> torch.Tensor:
    """``shape`` float64, as ``bells``."""
    return bells([text], shape)[0]


def permutations(texts: Sequence[str], count: int) -> torch.Tensor:
    """[T, count] int64: permutations of 0 .. count - 1."""
    return _words(texts, count).argsort(dim=1, stable=True)


def permutation(text: str, count: int) -> torch.Tensor:
    """A permutation of 0 .. count - 1, int64."""
    return permutations([text], count)[0]


def grid(text: str, shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
    """``shape`` float64: equally spaced values of (low, high) in random order, so no two are equal."""
    count = prod(shape)
    return (low + (high - low) * (permutation(text, count).to(torch.float64) + 0.5) / max(count, 1)).view(shape)


def distinct_fp32(values: torch.Tensor) -> torch.Tensor:
    """Positive values rounded to float32 and moved up by as few units in the last place as makes all of them differ."""
    patterns, order = values.flatten().to(torch.float32).view(torch.int32).to(torch.int64).sort(stable=True)
    ranks = torch.arange(patterns.numel())
    patterns = (patterns - ranks).cummax(0).values + ranks
    out = torch.empty_like(patterns)
    out[order] = patterns
    return out.to(torch.int32).view(torch.float32).view(values.shape)
