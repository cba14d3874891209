"""Where each checkpoint tensor must lie before a backend's own conversion: parameter, expert, half, region. Pure.

vLLM's convention (0.33.0, ``fused_moe/routed_experts.py``): ``{e}.gate_proj.<kind>`` and ``{e}.up_proj.<kind>`` go into ``w13_<kind>[e]``,
gate rows first and up rows after, ``{e}.down_proj.<kind>`` into ``w2_<kind>[e]``. Scalars of gate and up have a slot each, [E, 2], or
share one, [E]. Sizes that vLLM rounds up leave padding after each half's rows and after the columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cases.case import MoECase, Origin
from references.vocabulary import Layout

_NAME = re.compile(r"(?P<expert>\d+)\.(?P<projection>gate_proj|up_proj|down_proj)\.(?P<kind>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Of one checkpoint tensor. part of parts: 0 of 2 gate, 1 of 2 up, 0 of 1 the only one."""

    tensor: str
    kind: str  # "weight_scale"
    parameter: str  # "w13_weight_scale"
    expert: int
    part: int
    parts: int

    @property
    def half(self) -> str:
        """For a reader."""
        return ("gate rows", "up rows")[self.part] if self.parts == 2 else "rows"


def places(names: Mapping[str, object]) -> tuple[Place, ...]:
    """In the checkpoint's order. Raises ValueError for a name that is no expert's."""
    gated = any(".gate_proj." in name for name in names)
    found = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"checkpoint tensor {name!r} belongs to no expert")
        down = match["projection"] == "down_proj"
        found.append(
            Place(
                tensor=name,
                kind=match["kind"],
                parameter=f"{'w2' if down else 'w13'}_{match['kind']}",
                expert=int(match["expert"]),
                part=int(gated and match["projection"] == "up_proj"),
                parts=2 if gated and not down else 1,
            )
        )
    return tuple(found)


def rounded_up(case: MoECase) -> bool:
    """Whether the method may hold padding: online blocks are made of whole ones (quantization/online/fp8.py, maybe_roundup_sizes)."""
    return case.origin is Origin.ONLINE and case.weight_scale is Layout.BLOCK128


def region(parameter: torch.Tensor, place: Place, tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``parameter`` [E, ...] that holds ``tensor``, in the tensor's shape.

    Raises:
        ValueError: the parameter has no room for it there; the message has both shapes.
    """
    misfit = ValueError(f"{place.parameter} {list(parameter.shape)} has no place for {place.tensor} {list(tensor.shape)}")
    if parameter.dim() < 1 or place.expert >= parameter.shape[0]:
        raise misfit
    cell = parameter[place.expert]
    if tensor.numel() == 1 and cell.numel() in (1, place.parts):
        return cell.reshape(-1)[place.part if cell.numel() == place.parts else 0].reshape(tensor.shape)
    while cell.dim() > tensor.dim() and cell.shape[-1] == 1:
        cell = cell.squeeze(-1)
    shape = tuple(tensor.shape)
    while len(shape) > cell.dim() and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) != cell.dim() or not shape or cell.shape[0] % place.parts:
        raise misfit
    rows = cell.shape[0] // place.parts
    half = cell[place.part * rows : (place.part + 1) * rows]
    if any(room < size for room, size in zip(half.shape, shape, strict=True)):
        raise misfit
    return half[tuple(slice(size) for size in shape)].reshape(tensor.shape)


def shared(parameter: torch.Tensor, place: Place) -> bool:
    """Whether gate and up have one slot between them."""
    return place.parts == 2 and parameter.dim() >= 1 and parameter[0].numel() == 1
