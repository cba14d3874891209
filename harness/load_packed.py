"""What converters of packed and microscaled layers are handed, and what a lane that keeps the layout holds, against the checkpoint.

As harness/load_views.py does it for a code to an element; where codes lie: references/loaded_forms.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from cases import packed
from cases.case import MoECase
from harness.load_oracles import Finding, Oracle
from harness.load_places import rounded_up
from references import loaded_forms
from references.checkpoint_packed import BITS, MIDDLE
from references.formats import decode, round_to
from references.packing import unpack_nibbles
from references.vocabulary import CheckpointFormat, Format, Layout

if TYPE_CHECKING:
    from references.loading import LoadedExpert, Matrix

_WEIGHT = ("{}_weight_packed", "{}_qweight", "{}_weight", "{}")
_SCALE = ("{}_weight_scale", "{}_scales", "{}_scale")
_POINTS = ("{}_weight_zero_point", "{}_qzeros")
_DIVIDES, _MULTIPLIES = "{}_weight_global_scale", ("{}_weight_scale_2", "{}_scale_2")


def check(
    case: MoECase, experts: tuple[LoadedExpert, ...], given: Mapping[str, torch.Tensor], oracle: Oracle, where: str, *, whole: bool
) -> Iterator[Finding]:
    """whole: weights and scales of both matrices must be there; otherwise those that are there are checked."""
    for prefix in ("w13", "w2"):
        matrices: list[Matrix] = [getattr(expert, prefix) for expert in experts]
        parts = 2 if prefix == "w13" and case.activation.gated else 1
        for what, names, reads in (("weight", _WEIGHT, _weights), ("weight_scale", _SCALE, _scales)):
            tensor = _first(given, prefix, names)
            if tensor is None:
                if whole:
                    text = f"{where}: {prefix} has no {what} among {', '.join(sorted(given)) or 'nothing'}"
                    yield Finding(oracle=oracle, what=f"{where}:{what}", text=text)
                continue
            try:
                trouble = reads(case, matrices, tensor, parts, given, prefix)
            except ValueError as error:
                trouble = str(error)
            if trouble:
                yield Finding(oracle=oracle, what=f"{where}:{what}", text=f"{where}: {prefix} {what} {list(tensor.shape)} {trouble}")


def _first(given: Mapping[str, torch.Tensor], prefix: str, names: tuple[str, ...]) -> torch.Tensor | None:
    return next((given[name.format(prefix)] for name in names if name.format(prefix) in given), None)


def _weights(
    case: MoECase, matrices: list[Matrix], tensor: torch.Tensor, parts: int, given: Mapping[str, torch.Tensor], prefix: str
) -> str:
    rows, columns = matrices[0].codes.shape
    points = _first(given, prefix, _POINTS) if case.weight.has_zero_point else None
    for expert, matrix in enumerate(matrices):
        if case.weight in packed.INTEGERS:
            held = loaded_forms.codes(tensor[expert], BITS[case.weight], rows, columns, awq=_awq(case))
            actual = (held - _middle(case, None if points is None else points[expert], matrix)).double()
        else:
            cell = tensor[expert]
            if case.weight is Format.E2M1:
                cell = unpack_nibbles(cell.view(torch.uint8))
            actual = _unpadded(case, decode(cell, case.weight), rows, columns, parts)
        wrong = (actual < matrix.low) | (actual > matrix.high)
        if bool(wrong.any()):
            i, j = (int(k) for k in wrong.nonzero()[0])
            first = f"first at [{i}, {j}]: expected {matrix.codes[i, j]:.9g}, actual {actual[i, j]:.9g}"
            return f"of expert {expert}: {int(wrong.sum())} of {wrong.numel()} codes differ, {first}"
    return ""


def _awq(case: MoECase) -> bool:
    return case.checkpoint is CheckpointFormat.AWQ


def _middle(case: MoECase, points: torch.Tensor | None, matrix: Matrix) -> torch.Tensor | int:
    """What is subtracted from unsigned codes: [N, K] or a number."""
    if not case.weight.has_zero_point:
        return MIDDLE[case.weight]
    if points is None:
        raise ValueError("has no zero points beside it")
    rows, columns = matrix.codes.shape
    groups = 1 if matrix.scale is None else matrix.scale.shape[1]
    found = loaded_forms.zero_points(points, BITS[case.weight], rows, groups, awq=_awq(case))
    return found if groups == 1 else found.repeat_interleave(columns // groups, 1)


def _scales(case: MoECase, matrices: list[Matrix], tensor: torch.Tensor, parts: int, given: Mapping[str, torch.Tensor], prefix: str) -> str:
    fmt = packed.scale_format(case)
    for expert, matrix in enumerate(matrices):
        assert matrix.scale is not None
        rows, groups = matrix.scale.shape
        cell = tensor[expert]
        if case.weight in packed.INTEGERS:
            actual = loaded_forms.scales(cell, rows, groups).double()
        else:
            cell = cell.view(torch.uint8) if fmt is Format.E8M0 else cell
            actual = _unpadded(case, decode(cell, fmt), rows, groups, parts)
        if case.weight_scale is Layout.GROUP16:
            actual = round_to(actual * _whole(given, prefix, expert, rows), Format.FP32)
        wrong = actual != matrix.scale
        if bool(wrong.any()):
            i, j = (int(k) for k in wrong.nonzero()[0])
            first = f"first row {i}, group {j}: expected {matrix.scale[i, j]:.9g}, actual {actual[i, j]:.9g}"
            return f"of expert {expert}: {int(wrong.sum())} of {wrong.numel()} scales differ, {first}"
    return ""


def _whole(given: Mapping[str, torch.Tensor], prefix: str, expert: int, rows: int) -> torch.Tensor:
    """NVFP4's scale of the whole matrix, or of each half: [rows, 1] float64."""
    found = _first(given, prefix, _MULTIPLIES)
    if found is None:
        divides = given.get(_DIVIDES.format(prefix))
        if divides is None:
            raise ValueError("has no scale of the whole beside it")
        found = round_to(1.0 / divides.double(), Format.FP32)
    mine = found[expert].double().reshape(-1, 1)
    return mine.repeat_interleave(rows // mine.shape[0], 0)


def _unpadded(case: MoECase, cell: torch.Tensor, rows: int, columns: int, parts: int) -> torch.Tensor:
    """[rows, columns] of [rows', columns']: where sizes are rounded up, padding follows each half and the columns."""
    room, wide = cell.shape
    fits = room >= rows and wide >= columns and room % parts == 0 if rounded_up(case) else (room, wide) == (rows, columns)
    if not fits:
        raise ValueError(f"is no {rows} x {columns}")
    halves = [half[: rows // parts, :columns] for half in cell.chunk(parts)]
    return torch.cat(halves)
