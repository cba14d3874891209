"""Where each checkpoint tensor must lie before a backend's own conversion: parameter, expert, half, region. Pure.

vLLM's convention (0.33.0, ``fused_moe/routed_experts.py``): ``{e}.gate_proj.<kind>`` and ``{e}.up_proj.<kind>`` go into ``w13_<kind>[e]``,
gate rows first and up rows after, ``{e}.down_proj.<kind>`` into ``w2_<kind>[e]``. Scalars of gate and up have a slot each, [E, 2], or
share one, [E]. Sizes that vLLM rounds up leave padding after each half's rows and after the columns.

``gate_up_proj`` [E, 2*I, H] and ``down_proj`` [E, H, I] hold all experts, gate and up rows as they are; so do gpt-oss's ``_blocks``,
``_scales`` and ``_bias`` of both, whose padding follows all rows (``models/gpt_oss.py``).

GPTQ and AWQ files are repacked as they are loaded where Triton reads them (``quantization/moe_wna16.py``): codes [N, K] as uint8, two to a
byte along K when they have four bits, zero points likewise along N, scales [N, G]. Elsewhere parameters lie as the file does, K first: gate
columns first and up columns after.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cases.case import MoECase, Origin
from references.checkpoint_packed import BITS
from references.packing import AWQ_ORDER, pack_nibbles, unpack_words
from references.vocabulary import CheckpointFormat, Format, Layout

_NAME = re.compile(r"(?P<expert>\d+)\.(?P<projection>gate_proj|up_proj|down_proj)\.(?P<kind>.+)")


_K_FIRST = (CheckpointFormat.GPTQ, CheckpointFormat.AWQ)
_TURNED = ("qweight", "qzeros", "scales")
_REPACKS = "MoeWNA16Method"
_SHARED = ("weight_shape",)
_ALL_EXPERTS = re.compile(r"(?P<projection>gate_up_proj|down_proj)(?P<kind>|_blocks|_scales|_bias)")
_KIND_OF_ALL = {"": "weight", "_blocks": "weight", "_scales": "weight_scale", "_bias": "bias"}
EVERY = -1  # Place.expert of a tensor that holds all of them


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
        if self.expert == EVERY or self.parts == 1:
            return "rows"
        return ("gate rows", "up rows")[self.part]


def places(names: Mapping[str, object]) -> tuple[Place, ...]:
    """In the checkpoint's order. Raises ValueError for a name that is no expert's."""
    gated = any(".gate_proj." in name for name in names)
    found = []
    for name in names:
        if stacked := _ALL_EXPERTS.fullmatch(name):
            kind, both = _KIND_OF_ALL[stacked["kind"]], stacked["projection"] == "gate_up_proj"
            parts = 2 if name == "gate_up_proj" else 1
            found.append(Place(tensor=name, kind=kind, parameter=f"{'w13' if both else 'w2'}_{kind}", expert=EVERY, part=0, parts=parts))
            continue
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


def interleaved(case: MoECase) -> bool:
    """Whether gate and up rows alternate, in the file and in the parameter."""
    return case.activation.value == "swigluoai"


def passed_over(case: MoECase, kind: str) -> bool:
    """Kinds that no layer is meant to take: the group of each column, which is in order, and zero points of symmetric codes."""
    return case.checkpoint in _K_FIRST and (kind == "g_idx" or (kind == "qzeros" and not case.weight.has_zero_point))


def held(case: MoECase, tensors: Mapping[str, torch.Tensor], quant_method: str) -> dict[str, torch.Tensor]:
    """What the layer's parameters hold of each checkpoint tensor, before conversion, by its names; rows of the weight first."""
    taken = {name: tensor for name, tensor in tensors.items() if not passed_over(case, name.rpartition(".")[2])}
    if case.checkpoint is CheckpointFormat.GPT_OSS:
        return {name: tensor.flatten(2) if name.endswith("_blocks") else tensor for name, tensor in taken.items()}
    if case.checkpoint not in _K_FIRST:
        return taken
    if quant_method == _REPACKS:
        return {name: _repacked(case, name.rpartition(".")[2], tensor) for name, tensor in taken.items()}
    return {name: tensor.T if name.rpartition(".")[2] in _TURNED else tensor for name, tensor in taken.items()}


def turned(case: MoECase, kind: str, parameter: torch.Tensor, quant_method: str) -> torch.Tensor:
    """``parameter`` [E, N, ...] with rows of the weight first, whatever way it lies."""
    as_filed = case.checkpoint in _K_FIRST and quant_method != _REPACKS and kind in _TURNED
    return parameter.transpose(1, 2) if as_filed and parameter.dim() == 3 else parameter


def _repacked(case: MoECase, kind: str, tensor: torch.Tensor) -> torch.Tensor:
    bits = BITS[case.weight]
    awq = case.checkpoint is CheckpointFormat.AWQ
    order = AWQ_ORDER if awq else None
    match kind:
        case "qweight":
            codes = unpack_words(tensor, bits, 1 if awq else 0, order).T
            return pack_nibbles(codes) if bits == 4 else codes
        case "qzeros":
            points = unpack_words(tensor, bits, 1, order).T + (0 if awq else 1)
            return pack_nibbles(points.T).T if bits == 4 else points
        case "scales":
            return tensor.T
        case _:
            return tensor


def rounded_up(case: MoECase) -> bool:
    """Whether the method may hold padding: online blocks are made of whole ones (quantization/online/fp8.py, maybe_roundup_sizes), and
    MXFP4 of what the backend asks (oracle/mxfp4.py, mxfp4_round_up_hidden_size_and_intermediate_size)."""
    blocks = case.origin is Origin.ONLINE and case.weight_scale is Layout.BLOCK128
    mxfp4 = case.weight is Format.E2M1 and case.weight_scale is Layout.GROUP32
    return blocks or (mxfp4 and case.checkpoint is not CheckpointFormat.COMPRESSED_TENSORS)


def region(parameter: torch.Tensor, place: Place, tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``parameter`` [E, ...] that holds ``tensor``, in the tensor's shape.

    Raises:
        ValueError: the parameter has no room for it there; the message has both shapes.
    """
    misfit = ValueError(f"{place.parameter} {list(parameter.shape)} has no place for {place.tensor} {list(tensor.shape)}")
    if place.expert == EVERY:
        return _of_all(parameter, place, tensor, misfit)
    if parameter.dim() < 1 or place.expert >= parameter.shape[0]:
        raise misfit
    cell = parameter[place.expert]
    if place.kind in _SHARED and cell.shape == tensor.shape:
        return cell
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


def _of_all(parameter: torch.Tensor, place: Place, tensor: torch.Tensor, misfit: ValueError) -> torch.Tensor:
    """As ``region``, of a tensor [E, N, K] or [E, N] of all experts; where sizes are rounded up, padding follows each half."""
    if parameter.dim() != tensor.dim() or any(room < size for room, size in zip(parameter.shape, tensor.shape, strict=True)):
        raise misfit
    rows, room = tensor.shape[1] // place.parts, parameter.shape[1] // place.parts
    columns = (slice(size) for size in tensor.shape[2:])
    kept = parameter[(slice(None), slice(None), *columns)]
    halves = [kept[:, part * room : part * room + rows] for part in range(place.parts)]
    return torch.cat(halves, 1)


def shared(parameter: torch.Tensor, place: Place) -> bool:
    """Whether gate and up have one slot between them."""
    return place.parts == 2 and parameter.dim() >= 1 and (parameter[0].numel() == 1 or place.kind in _SHARED)
