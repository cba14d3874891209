"""Ways of handing the same scales to the functional entry: other shapes, other strides, the same numbers.

What lies between and behind the elements of a view is a number that no scale has, so that a kernel that ignores strides shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import torch

_BETWEEN = 3.0 * 2.0**-10  # no power of two, so nothing a lattice holds; small, so that fp16 outputs stay finite


class Shape(StrEnum):
    """Of a scale tensor: E experts, N output channels, R x C blocks."""

    E = "[E]"
    E_1 = "[E, 1]"
    E_1_1 = "[E, 1, 1]"
    E_N = "[E, N]"
    E_N_1 = "[E, N, 1]"
    E_R_C = "[E, R, C]"
    SCALAR = "[]"
    ONE = "[1]"
    ONE_ONE = "[1, 1]"


class Strides(StrEnum):
    """How the elements lie in memory."""

    CONTIGUOUS = "contiguous"
    SECOND = "every second element of a buffer"
    TRANSPOSED = "the transpose of a buffer"
    ALONG_N = "one element an expert, expanded along N"  # stride 0
    EXPANDED = "one element, expanded"  # strides 0


class View(NamedTuple):
    """How one scale tensor is handed over. ``level``: contiguous, and as equal as those strides need the scales to be."""

    shape: Shape
    strides: Strides = Strides.CONTIGUOUS
    level: Strides | None = None

    def __str__(self) -> str:
        """``[E, N], one element, expanded``."""
        return f"{self.shape}, {self.strides}"

    @property
    def start(self) -> View:
        """The contiguous form with the same numbers."""
        return View(self.shape, level=self.level or self.strides)


def levels(how: View) -> bool:
    """Whether scales that differ are made equal."""
    return (how.level or how.strides) in (Strides.ALONG_N, Strides.EXPANDED)


def view(scale: torch.Tensor, how: View, count: int) -> torch.Tensor:
    """``scale`` as ``how`` says; scales that expansion makes equal become the smallest of them.

    Weights' scales: [E] per tensor, [E, N, 1] per channel, [E, R, C] per block, ``count`` N; activations' [1], ``count`` E.

    Raises:
        ValueError: the numbers cannot be seen that way.
    """
    shaped = _shaped(_levelled(scale, how.level or how.strides), how.shape, count)
    match how.strides:
        case Strides.CONTIGUOUS:
            return shaped.contiguous()
        case Strides.SECOND:
            buffer = _between(shaped, (*shaped.shape, 2))
            buffer[..., 0] = shaped
            return buffer[..., 0]
        case Strides.TRANSPOSED:
            first, second = (1, 2) if how.shape is Shape.E_R_C else (0, 1)
            if shaped.dim() < 2 or shaped.shape[first] == 1 or shaped.shape[second] == 1:
                raise ValueError(f"a scale of shape {list(shaped.shape)} has nothing to transpose")
            return shaped.transpose(first, second).contiguous().transpose(first, second)
        case Strides.ALONG_N:
            return shaped[:, :1].contiguous().expand(shaped.shape)
        case Strides.EXPANDED:
            buffer = _between(shaped, (shaped.numel() + 1,))
            buffer[0] = shaped.flatten()[0]
            return buffer[0].expand(shaped.shape)


def handed(tensors: Mapping[str, torch.Tensor], views: Mapping[str, View]) -> dict[str, torch.Tensor]:
    """The scale tensors that ``views`` names, as it says. tensors: ``w1`` [E, N, K], ``w2``, ``w1_scale``, ``a1_scale`` and so on."""
    experts = tensors["w1"].shape[0]
    counts = {"w1_scale": tensors["w1"].shape[1], "w2_scale": tensors["w2"].shape[1]}
    return {name: view(tensors[name], how, counts.get(name, experts)) for name, how in views.items()}


def _levelled(scale: torch.Tensor, strides: Strides) -> torch.Tensor:
    if strides is Strides.EXPANDED:
        return scale.min().expand(scale.shape)
    if strides is Strides.ALONG_N and scale.dim() > 1:
        return scale.amin(1, keepdim=True).expand(scale.shape)
    return scale


def _shaped(scale: torch.Tensor, shape: Shape, count: int) -> torch.Tensor:
    first = scale.shape[0]
    match shape:
        case Shape.E | Shape.E_1 | Shape.E_1_1:
            experts = count if first == 1 else first
            return scale.reshape(first).expand(experts).reshape(experts, *[1] * shape.count(","))
        case Shape.E_N | Shape.E_N_1:
            return scale.reshape(first, -1).expand(first, count).reshape(first, count, *[1] * (shape.count(",") - 1))
        case Shape.E_R_C:
            return scale
        case Shape.SCALAR | Shape.ONE | Shape.ONE_ONE:
            return scale.reshape({Shape.SCALAR: (), Shape.ONE: (1,), Shape.ONE_ONE: (1, 1)}[shape])


def _between(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.full(shape, _BETWEEN, dtype=scale.dtype, device=scale.device)
