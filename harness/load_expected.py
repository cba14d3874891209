"""The quantized weights that loading must arrive at, before any kernel's own layout."""

from __future__ import annotations

from dataclasses import replace

import torch

from cases.case import Entry, MoECase
from cases.checkpoint import Checkpoint
from cases.packed import is_packed
from harness import expected
from harness.architectures import requested
from harness.backends import Backend
from harness.recipes import recipe
from references.formats import decode, torch_dtype
from references.loading import LoadedExpert, Matrix, load
from references.moe import Expert
from references.vocabulary import Accumulator, Format, W13Merge

_FP16_SMALLEST_NORMAL = 2.0**-14


def quantized(case: MoECase, checkpoint: Checkpoint, backend: Backend) -> tuple[LoadedExpert, ...]:
    """Every expert after what loading does to it: halves merged, weights quantized online.

    Merging goes through fp16 (w8a8_utils.py, per_tensor_dequantize), and where a product is subnormal there, the code it is rounded to
    may be either neighbour of the exact quotient: less than what merging costs anyway. Everywhere else codes are the reference's.
    """
    here = Backend.INTERPRETER if requested() or is_packed(case) else backend  # a CPU that answers as a GPU rounds as a CPU
    how = recipe(case, Entry.LAYER, here)
    plain = replace(how, weight_requant=None, weight_scale_store=None, weight_store=None, accumulator=Accumulator.FP32)
    stored = expected.experts(case, checkpoint)
    loaded = load(stored, plain)
    if plain.w13_merge is not W13Merge.REQUANTIZE_TO_MAX:
        return loaded
    return tuple(replace(after, w13=_through_fp16(after.w13, before)) for after, before in zip(loaded, stored, strict=True))


def _through_fp16(merged: Matrix, stored: Expert) -> Matrix:
    halves = [half for half in (stored.gate, stored.up) if half is not None and half.scale is not None]
    if len(halves) < 2:
        return merged
    products = torch.cat([decode(half.codes, half.format) * half.scale.double() for half in halves if half.scale is not None])
    small = (products != 0) & (products.abs() < _FP16_SMALLEST_NORMAL)
    if not bool(small.any()):
        return merged
    below, above = neighbours(merged.low, merged.format)[0], neighbours(merged.high, merged.format)[1]
    return replace(merged, low=torch.where(small, below, merged.low), high=torch.where(small, above, merged.high))


def neighbours(codes: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """The next smaller and the next larger number of an 8-bit format, float64; the ends keep themselves."""
    every = decode(torch.arange(256, dtype=torch.uint8).view(torch_dtype(fmt)), fmt)
    ladder = every[torch.isfinite(every)].unique()  # sorted
    at = torch.searchsorted(ladder, codes)
    return ladder[(at - 1).clamp_min(0)], ladder[(at + 1).clamp_max(len(ladder) - 1)]
