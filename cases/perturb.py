"""Perturbations of a checkpoint: one scale of one projection times a power of two, everything else byte for byte the same.

A checkpoint without scales (unquantized, or quantized while loading) has the weights that share the scale multiplied instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from cases.axes import InvalidCase, Origin
from references.scales import GROUP
from references.vocabulary import Layout

if TYPE_CHECKING:
    from cases.case import MoECase
    from cases.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """One scale, or all scales of one projection.

    element: index into the flattened scale tensor of that projection; None: every one. activation: its input_scale instead.
    """

    expert: int
    projection: str  # "gate_proj", "up_proj", "down_proj"
    element: int | None = None
    activation: bool = False

    def __str__(self) -> str:
        """``down_proj.weight_scale[7] of expert 3``."""
        at = "" if self.element is None else f"[{self.element}]"
        return f"{self.projection}.{'input_scale' if self.activation else 'weight_scale'}{at} of expert {self.expert}"


def scale_grid(case: MoECase, projection: str) -> tuple[int, int]:
    """Scales of one projection: (rows of scales, columns of scales); unquantized layers count one per channel."""
    rows, columns = case.shape(projection)
    match case.weight_scale:
        case Layout.TENSOR:
            return 1, 1
        case Layout.BLOCK128:
            return -(-rows // GROUP), -(-columns // GROUP)
        case _:
            return rows, 1


def scaled_rows(case: MoECase, spot: Spot) -> slice:
    """Output channels of the projection that ``spot`` scales."""
    if spot.element is None or case.weight_scale is Layout.TENSOR:
        return slice(None)
    if case.weight_scale is Layout.BLOCK128:
        row = spot.element // scale_grid(case, spot.projection)[1]
        return slice(row * GROUP, (row + 1) * GROUP)
    return slice(spot.element, spot.element + 1)


def scaled_columns(case: MoECase, spot: Spot) -> slice:
    """Columns of the projection's weight that ``spot`` scales."""
    if spot.element is None or case.weight_scale is not Layout.BLOCK128:
        return slice(None)
    column = spot.element % scale_grid(case, spot.projection)[1]
    return slice(column * GROUP, (column + 1) * GROUP)


def perturb(case: MoECase, checkpoint: Checkpoint, spot: Spot, factor: float) -> Checkpoint:
    """``checkpoint`` with ``spot`` multiplied by ``factor``; no tensor is shared where it differs.

    Raises:
        InvalidCase: factor is no power of two, the spot does not exist, or a multiplied weight is no number of its dtype.
    """
    if torch.frexp(torch.tensor(factor, dtype=torch.float64))[0] != 0.5:
        raise InvalidCase(f"a perturbation multiplies by a power of two, got {factor}")
    prefix = f"{spot.expert}.{spot.projection}"
    if spot.activation:
        name = f"{prefix}.input_scale"
    elif case.origin is Origin.PREQUANTIZED:
        inverse = f"{prefix}.weight_scale_inv"  # what vLLM's own block checkpoints call it; it multiplies all the same
        name = inverse if inverse in checkpoint.tensors else f"{prefix}.weight_scale"
    else:
        name = f"{prefix}.weight"
    if name not in checkpoint.tensors:
        raise InvalidCase(f"the checkpoint has no {name} to perturb")
    count = scale_grid(case, spot.projection)
    if spot.element is not None and not 0 <= spot.element < count[0] * count[1]:
        raise InvalidCase(f"{prefix} has {count[0] * count[1]} scales, got element {spot.element}")
    before = checkpoint.tensors[name]
    after = before.clone()
    if name.endswith(".weight"):
        part = (scaled_rows(case, spot), scaled_columns(case, spot))
        after[part] = after[part] * factor
        exact = torch.equal(after[part].to(torch.float64), before[part].to(torch.float64) * factor)
    else:
        flat = after.view(-1)
        at = slice(None) if spot.element is None else slice(spot.element, spot.element + 1)
        flat[at] = flat[at] * factor
        exact = torch.equal(flat[at].to(torch.float64), before.reshape(-1)[at].to(torch.float64) * factor)
    if not exact:
        raise InvalidCase(f"{name} times {factor} leaves the range of {before.dtype}")
    return replace(checkpoint, tensors={**checkpoint.tensors, name: after})


def rename_experts(checkpoint: Checkpoint, new_index: list[int]) -> Checkpoint:
    """The same experts under other numbers: expert e becomes ``new_index[e]``."""
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        expert, _, rest = name.partition(".")
        tensors[f"{new_index[int(expert)]}.{rest}"] = tensor
    ordered = dict(sorted(tensors.items(), key=lambda item: int(item[0].partition(".")[0])))
    return replace(checkpoint, tensors=ordered)
