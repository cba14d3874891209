"""What converters are handed and what a loaded layer holds, against the quantized weights that the reference makes of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from cases.case import MoECase, Origin
from cases.packed import is_packed
from harness import load_packed
from harness.backends import Backend
from harness.load_oracles import Finding, Oracle
from harness.load_places import interleaved, rounded_up
from references.formats import decode, torch_dtype
from references.loading import LoadedExpert, Matrix
from references.vocabulary import Format, Layout

if TYPE_CHECKING:
    from harness.subject.loading import Handed, Loading

_WEIGHT = ("{}_weight", "{}")
_SCALE = ("{}_weight_scale_inv", "{}_weight_scale", "{}_scale")
_LAYOUTS = (Layout.NONE, Layout.TENSOR, Layout.CHANNEL, Layout.BLOCK128)
_WHOLE = (Format.FP32, Format.BF16, Format.FP16, Format.INT8, Format.E4M3FN)  # a code to an element
KEEPS_LAYOUT = (Backend.INTERPRETER, Backend.TRITON)  # lanes whose kernels read the weights as they are quantized


def speaks_of(case: MoECase) -> bool:
    """Whether codes and scales are laid out in a way that is read here or in harness/load_packed.py."""
    online_nvfp4 = case.origin is Origin.ONLINE and case.weight_scale is Layout.GROUP16  # for SM100: nothing to hear it on
    return not online_nvfp4 if is_packed(case) else case.weight in _WHOLE and case.weight_scale in _LAYOUTS


def converted(case: MoECase, experts: tuple[LoadedExpert, ...], seen: Loading, backend: Backend) -> Iterator[Finding]:
    """Each converter's view, and the layer's own afterwards where the lane keeps the layout."""
    check = load_packed.check if is_packed(case) else _check
    for handed in seen.handed:
        given, whole = _view(handed)
        yield from check(case, experts, _in_halves(case, given), Oracle.HANDED, handed.converter, whole=whole)
    if backend in KEEPS_LAYOUT and _keeps(case) and not seen.ended:
        yield from check(case, experts, _in_halves(case, seen.after), Oracle.LEFT, "layer", whole=True)


def _keeps(case: MoECase) -> bool:
    """Of the packed formats Triton's lanes make other layouts for MXFP4: triton_kernels' own, or Marlin's."""
    return not (is_packed(case) and case.weight is Format.E2M1 and case.weight_scale is Layout.GROUP32)


def _in_halves(case: MoECase, given: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Gate rows first, up rows after, where they alternate."""
    if not interleaved(case):
        return given
    rows = 2 * case.intermediate

    def sorted_rows(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat((tensor[:, :rows:2], tensor[:, 1:rows:2]), 1)

    return {name: sorted_rows(t) if name.startswith("w13") and t.dim() > 1 and t.shape[1] >= rows else t for name, t in given.items()}


def _view(handed: Handed) -> tuple[Mapping[str, torch.Tensor], bool]:
    """A converter reads its arguments, or, handed a layer alone, all that the layer's state holds."""
    if any(name.format(prefix) in handed.arguments for name in _WEIGHT for prefix in ("w13", "w2")):
        return handed.arguments, False
    return handed.state, True


def _check(
    case: MoECase, experts: tuple[LoadedExpert, ...], given: Mapping[str, torch.Tensor], oracle: Oracle, where: str, *, whole: bool
) -> Iterator[Finding]:
    """whole: every tensor must be there; otherwise those that are there are checked."""
    for prefix in ("w13", "w2"):
        matrices = [getattr(expert, prefix) for expert in experts]
        parts = 2 if prefix == "w13" and case.activation.gated else 1
        found = {"weight": _first(given, prefix, _WEIGHT), "weight_scale": _first(given, prefix, _SCALE)}
        found["bias"] = given.get(f"{prefix}_bias")
        wanted = {"weight": True, "weight_scale": matrices[0].scale is not None, "bias": matrices[0].bias is not None}
        checks = {"weight": _codes, "weight_scale": _scales, "bias": _biases}
        for what, tensor in found.items():
            if not wanted[what]:
                continue
            if tensor is None:
                if whole:
                    text = f"{where}: {prefix} has no {what} among {', '.join(sorted(given)) or 'nothing'}"
                    yield Finding(oracle=oracle, what=f"{where}:{what}", text=text)
                continue
            trouble = checks[what](case, matrices, tensor, parts)
            if trouble:
                yield Finding(oracle=oracle, what=f"{where}:{what}", text=f"{where}: {prefix} {what} {list(tensor.shape)} {trouble}")


def _first(given: Mapping[str, torch.Tensor], prefix: str, names: tuple[str, ...]) -> torch.Tensor | None:
    return next((given[name.format(prefix)] for name in names if name.format(prefix) in given), None)


def _halves(matrix: torch.Tensor, cell: torch.Tensor, parts: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of ``matrix`` [N, ...] and of ``cell`` [N', ...], part by part; padding of ``cell`` left out."""
    size, room = matrix.shape[0] // parts, cell.shape[0] // parts
    for part in range(parts):
        yield matrix[part * size : (part + 1) * size], cell[part * room : part * room + size]


def _codes(case: MoECase, matrices: list[Matrix], tensor: torch.Tensor, parts: int) -> str:
    dtype = torch_dtype(matrices[0].format)
    rows, columns = matrices[0].codes.shape
    if tensor.dtype is not dtype:
        return f"is {tensor.dtype}, the quantized weights are {dtype}"
    shape = (len(matrices), rows, columns)
    fits = tensor.shape == shape or (rounded_up(case) and all(room >= size for room, size in zip(tensor.shape, shape, strict=False)))
    if tensor.dim() != len(shape) or not fits:
        return f"is no {list(shape)}"
    for expert, matrix in enumerate(matrices):
        cell = decode(tensor[expert][:, :columns], matrix.format)
        bounds = zip(_halves(matrix.low, cell, parts), _halves(matrix.high, cell, parts), strict=True)
        for part, ((low, actual), (high, _)) in enumerate(bounds):
            wrong = ~((low <= actual) & (actual <= high)) & ~(torch.isfinite(actual) & _by_zero(matrix, part, parts))
            if bool(wrong.any()):
                i, j = (int(k) for k in wrong.nonzero()[0])
                allowed = f"{low[i, j]:.9g}" if low[i, j] == high[i, j] else f"{low[i, j]:.9g} to {high[i, j]:.9g}"
                return (
                    f"of expert {expert}, {_half(part, parts)}: {int(wrong.sum())} of {wrong.numel()} codes differ, "
                    f"first at [{i}, {j}]: expected {allowed}, actual {actual[i, j]:.9g}"
                )
    return ""


def _by_zero(matrix: Matrix, part: int, parts: int) -> torch.Tensor:
    """[rows, 1] bool: rows whose every scale is 0, so that any finite code is the same weight."""
    if matrix.scale is None:
        return torch.zeros(1, 1, dtype=torch.bool)
    return (matrix.scale == 0).all(1, keepdim=True).chunk(parts)[part]


def _half(part: int, parts: int) -> str:
    return ("gate", "up")[part] if parts == 2 else "rows"


def _scales(case: MoECase, matrices: list[Matrix], tensor: torch.Tensor, parts: int) -> str:
    if tensor.dim() == 0 or tensor.shape[0] != len(matrices):
        return f"is not one for each of {len(matrices)} experts"
    for expert, matrix in enumerate(matrices):
        assert matrix.scale is not None
        rows = matrix.scale.shape[0]
        try:
            actual = _by_row(case.weight_scale, tensor[expert].double(), rows, matrix.scale.shape[1], parts)
        except ValueError as error:
            return str(error)
        wrong = actual != matrix.scale
        if bool(wrong.any()):
            i, j = (int(k) for k in wrong.nonzero()[0])
            return (
                f"of expert {expert}: {int(wrong.any(1).sum())} of {rows} rows have another scale, first row {i}, group {j}: "
                f"expected {matrix.scale[i, j]:.9g}, actual {actual[i, j]:.9g}"
            )
    return ""


def _by_row(layout: Layout, cell: torch.Tensor, rows: int, groups: int, parts: int) -> torch.Tensor:
    """One expert's scales as [rows, groups]. Raises ValueError for a shape that is not the layout's."""
    misfit = ValueError(f"has {list(cell.shape)} for each expert, which is no {layout} scale of {rows} rows")
    match layout:
        case Layout.TENSOR if cell.numel() in (1, parts):
            return cell.reshape(-1, 1).repeat_interleave(rows // cell.numel(), 0)
        case Layout.CHANNEL if cell.numel() == rows:
            return cell.reshape(rows, 1)
        case Layout.BLOCK128 if cell.dim() == 2 and cell.shape[0] % parts == 0 and cell.shape[1] == groups:
            halves = cell.reshape(parts, -1, groups).repeat_interleave(128, 1)
            if halves.shape[1] >= rows // parts:
                return halves[:, : rows // parts].reshape(rows, groups)
    raise misfit


def _biases(case: MoECase, matrices: list[Matrix], tensor: torch.Tensor, parts: int) -> str:
    for expert, matrix in enumerate(matrices):
        assert matrix.bias is not None
        for part, (wanted, actual) in enumerate(_halves(matrix.bias, tensor[expert].double(), parts)):
            if wanted.shape != actual.shape or bool((wanted != actual).any()):
                return f"of expert {expert}, {_half(part, parts)}, is not the checkpoint's"
    return ""
