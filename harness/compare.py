"""Deciding: attributes, then NaN and infinities, then values against the interval; and, through its own door, equality.

Nothing here is tuned and nothing is phrased: judge.py says it in words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from harness.preimage import overflow_edge, preimage
from harness.verdict import Outcome
from references.formats import torch_dtype
from references.moe import Answer

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How one output stands to its interval. ``bad`` and ``margins`` are [M, H], or empty when the attributes already differ."""

    outcome: Outcome  # PASS | MISMATCH | NONDETERMINISTIC
    attributes: tuple[str, ...]  # "dtype is torch.float16, expected torch.bfloat16"
    bad: torch.Tensor  # bool, outside the interval
    margins: torch.Tensor  # f64, 1 is the edge, inf where nothing else was allowed
    margin: float | None  # largest of margins; None when the attributes differ
    nan: int = 0  # positions where exactly one side is NaN
    inf: int = 0  # positions where actual is infinite and may not be, or is finite and must not be
    changed: int = 0  # elements whose bits differ between the two runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """Equality of two tensors, bit for bit."""

    identical: bool
    attributes: tuple[str, ...] = ()
    differing: int = 0
    index: tuple[int, ...] = ()  # of the first difference, row-major
    expected: str = ""  # "0.5 (0x3f00)"
    actual: str = ""


def compare(answer: Answer, actual: torch.Tensor, *, repeat: torch.Tensor | None = None) -> Comparison:
    """Compare ``actual`` [M, H] with what the reference allows; ``repeat`` is the same run once more.

    Honest means round(low) <= actual <= round(high) in ``answer.output``, elementwise. Margin of an element: its error over what is
    allowed, |actual - expected| / (radius on that side + the last rounding's half gap at actual); as rounding is monotone, it is at
    most 1 exactly where the element is honest. Where the radius is zero only one value is allowed: 0 for it, inf for any other.
    """
    differing = attributes(actual, answer.expected.shape, torch_dtype(answer.output))
    if differing:
        empty = torch.empty(0, 0)
        return Comparison(outcome=Outcome.MISMATCH, attributes=differing, bad=empty.bool(), margins=empty.double(), margin=None)
    changed = 0 if repeat is None else bits(actual, repeat).differing or int(bool(attributes(repeat, actual.shape, actual.dtype)))
    margins = _margins(answer, actual)
    bad = margins > 1
    nan_here, nan_there = torch.isnan(actual), torch.isnan(answer.expected)
    outcome = Outcome.NONDETERMINISTIC if changed else Outcome.MISMATCH if bool(bad.any()) else Outcome.PASS
    infinite = torch.isinf(actual) | (answer.expected.abs() >= overflow_edge(actual.dtype))
    return Comparison(
        outcome=outcome,
        attributes=(),
        bad=bad,
        margins=margins,
        margin=float(margins.max()) if margins.numel() else 0.0,
        nan=int((nan_here != nan_there).sum()),
        inf=int((infinite & bad & ~nan_here & ~nan_there).sum()),
        changed=changed,
    )


def bits(expected: torch.Tensor, actual: torch.Tensor) -> Bits:
    """Exact equality, for claims that allow none else: shape, dtype, device, then every bit (so -0 is not 0)."""
    differing = attributes(actual, expected.shape, expected.dtype, expected.device)
    if differing:
        return Bits(identical=False, attributes=differing)
    kind = _INTEGER[expected.element_size()]
    left, right = expected.contiguous().view(kind), actual.contiguous().view(kind)
    where = (left != right).nonzero()
    if not len(where):
        return Bits(identical=True)
    index = tuple(int(i) for i in where[0])
    return Bits(
        identical=False,
        differing=len(where),
        index=index,
        expected=show(expected[index]),
        actual=show(actual[index]),
    )


def show(value: torch.Tensor) -> str:
    """One element in decimal and in hexadecimal bits: ``0.5 (0x3f00)``."""
    size = value.element_size()
    code = int(value.reshape(1).contiguous().view(_INTEGER[size]).item()) & ((1 << 8 * size) - 1)
    return f"{value.item():.9g} (0x{code:0{2 * size}x})"


def attributes(actual: torch.Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device | None = None) -> tuple[str, ...]:
    """Sentences for every attribute that is not as expected; the device defaults to the CPU, where results are handed over."""
    wanted = {"shape": tuple(shape), "dtype": dtype, "device": device or torch.device("cpu")}
    found = {"shape": tuple(actual.shape), "dtype": actual.dtype, "device": actual.device}
    return tuple(f"{name} is {found[name]}, expected {wanted[name]}" for name in wanted if found[name] != wanted[name])


def _margins(answer: Answer, actual: torch.Tensor) -> torch.Tensor:
    """[M, H] f64 margins; > 1 exactly where the element is outside its interval."""
    lower, upper = preimage(actual)
    wide = actual.double()
    error = wide - answer.expected
    allowed = torch.where(error > 0, answer.high - answer.expected + (wide - lower), answer.expected - answer.low + (upper - wide))
    margins = torch.where(error == 0, 0.0, error.abs() / allowed)
    even = (actual.contiguous().view(_INTEGER[actual.element_size()]) & 1) == 0  # a tie rounds to it: the edges are its own
    inside = torch.where(even, (answer.low <= upper) & (answer.high >= lower), (answer.low < upper) & (answer.high > lower))
    point = answer.low == answer.high
    far = margins.nan_to_num(torch.inf, torch.inf).clamp_min(math.nextafter(1, 2)).masked_fill(point, torch.inf)
    margins = torch.where(inside, margins.nan_to_num(0.0, torch.inf).clamp_max(1.0).masked_fill(point, 0.0), far)
    nan_here, nan_there = torch.isnan(actual), torch.isnan(answer.expected)
    margins = torch.where(nan_here != nan_there, torch.inf, margins)
    return torch.where(nan_here & nan_there, 0.0, margins)
