"""What a layer holds once it is converted for Humming's 16-bit kernels, against the quantized weights that the reference makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from cases.case import MoECase
from cases.checkpoint import Checkpoint
from harness import load_expected
from harness.backends import Backend
from harness.load_oracles import Finding, Oracle
from references.formats import decode, round_to, torch_dtype
from references.humming_layout import column_scales, weight_codes
from references.loading import LoadedExpert, Matrix
from references.packing import unpack_nibbles
from references.vocabulary import Format, Layout

if TYPE_CHECKING:
    from harness.subject.loading import Loading

WHERE = "humming"
_BITS = {Format.INT8: 8, Format.E4M3FN: 8, Format.E2M1: 4}
_ACTIVATION_BITS = 16
_NO_OFFSET = -128  # the one code that has no sign and magnitude in 8 bits


def speaks_of(case: MoECase) -> bool:
    """Whether the layout is one that is read here: powers of two of an fp16 layer are moved into another exponent range."""
    return case.quantized and case.weight in _BITS and (case.dtype is Format.BF16 or case.weight_scale is not Layout.GROUP32)


def left(case: MoECase, experts: tuple[LoadedExpert, ...], seen: Loading) -> Iterator[Finding]:
    """Every code and scale, taken from where the GEMM will read it."""
    for prefix in ("w13", "w2"):
        matrices: list[Matrix] = [getattr(expert, prefix) for expert in experts]
        for what, check in (("weight", _codes), ("weight_scale", _scales)):
            tensor = seen.after.get(f"{prefix}_{what}")
            trouble = "is not there" if tensor is None else check(case, matrices, tensor)
            if trouble:
                yield Finding(oracle=Oracle.LEFT, what=f"{WHERE}:{what}", text=f"{WHERE}: {prefix} {what} {trouble}")


def quantized(case: MoECase, checkpoint: Checkpoint) -> tuple[LoadedExpert, ...]:
    """What loading arrives at on a CPU before Humming's conversion."""
    return load_expected.quantized(case, checkpoint, Backend.INTERPRETER)


def handed(case: MoECase, experts: tuple[LoadedExpert, ...], seen: Loading) -> Iterator[Finding]:
    """What ``layer.state_dict()`` holds where the conversion takes it from, scaled by groups of columns: codes as on disk, E8M0 bytes."""
    views = [each.state for each in seen.handed if "humming" in each.converter]
    if not views:
        yield Finding(oracle=Oracle.HANDED, what=f"{WHERE}:nothing", text=f"{WHERE}: no layer was handed to its conversion")
    for state in views:
        for prefix in ("w13", "w2"):
            matrices: list[Matrix] = [getattr(expert, prefix) for expert in experts]
            weight, scale = state.get(f"{prefix}_weight"), state.get(f"{prefix}_weight_scale")
            if weight is None or scale is None:
                text = f"{WHERE}: {prefix} has no weight and weight_scale among {', '.join(sorted(state))}"
                yield Finding(oracle=Oracle.HANDED, what=f"{WHERE}:missing", text=text)
                continue
            codes = weight.view(torch.uint8)
            codes = unpack_nibbles(codes) if _BITS[case.weight] == 4 else codes
            scales = decode(scale.view(torch.uint8), Format.E8M0)
            for expert, matrix in enumerate(matrices):
                wrong = codes[expert].shape != matrix.codes.shape or _outside(matrix, _values(codes[expert], case.weight, offset=False))
                if wrong:
                    yield Finding(
                        oracle=Oracle.HANDED, what=f"{WHERE}:weight", text=f"{WHERE}: {prefix} of expert {expert} is not as quantized"
                    )
                if matrix.scale is None or scales[expert].shape != matrix.scale.shape or bool((scales[expert] != matrix.scale).any()):
                    text = f"{WHERE}: {prefix} scales of expert {expert} are not those it was quantized with"
                    yield Finding(oracle=Oracle.HANDED, what=f"{WHERE}:weight_scale", text=text)


def _outside(matrix: Matrix, actual: torch.Tensor) -> bool:
    return bool(((actual < matrix.low) | (actual > matrix.high)).any())


def _codes(case: MoECase, matrices: list[Matrix], words: torch.Tensor) -> str:
    rows, columns = matrices[0].codes.shape
    try:
        codes = weight_codes(words, rows, columns, bits=_BITS[case.weight], activation_bits=_ACTIVATION_BITS)
    except ValueError as error:
        return str(error)
    offset = any(bool((matrix.codes == _NO_OFFSET).any()) for matrix in matrices)
    for expert, matrix in enumerate(matrices):
        actual = _values(codes[expert], case.weight, offset=offset)
        nothing = torch.zeros(1, 1) if matrix.scale is None else (matrix.scale == 0).all(1, keepdim=True)
        wrong = ~((matrix.low <= actual) & (actual <= matrix.high)) & ~nothing.bool()
        if bool(wrong.any()):
            i, j = (int(k) for k in wrong.nonzero()[0])
            first = f"first at [{i}, {j}]: expected {matrix.codes[i, j]:.9g}, actual {actual[i, j]:.9g}"
            return f"of expert {expert}: {int(wrong.sum())} of {wrong.numel()} codes differ, {first}"
    return ""


def _values(codes: torch.Tensor, fmt: Format, *, offset: bool) -> torch.Tensor:
    """INT8 codes are signs and magnitudes or, where one of them has none, signs and distances from the middle (schema/humming.py)."""
    if fmt is not Format.INT8:
        return decode(codes.to(torch.uint8).view(torch_dtype(fmt)), fmt)
    negative = 127 - codes if offset else 128 - codes
    return torch.where(codes < 128, codes, negative).double()


def _scales(case: MoECase, matrices: list[Matrix], tensor: torch.Tensor) -> str:
    rows = matrices[0].codes.shape[0]
    if case.weight_scale is Layout.TENSOR:
        actual = tensor.double().reshape(len(matrices), -1, 1).expand(-1, rows if tensor.numel() == len(matrices) else -1, -1)
    else:
        actual = column_scales(tensor.float().double(), rows, on_result=case.weight_scale is Layout.CHANNEL)
    for expert, matrix in enumerate(matrices):
        assert matrix.scale is not None
        expected = matrix.scale if case.weight_scale is Layout.TENSOR else round_to(matrix.scale, case.dtype)
        found = actual[expert][:, : expected.shape[1]]
        if found.shape != expected.shape:
            return f"{list(tensor.shape)} holds no {case.weight_scale} scale of {rows} rows"
        wrong = found != expected
        if bool(wrong.any()):
            i, j = (int(k) for k in wrong.nonzero()[0])
            first = f"first row {i}, group {j}: expected {expected[i, j]:.9g}, actual {found[i, j]:.9g}"
            return f"of expert {expert}: {int(wrong.any(1).sum())} of {rows} rows have another scale, {first}"
    return ""
