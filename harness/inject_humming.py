"""What Humming's fp16 kernels make of E8M0 scales, and of results of MXFP4 weights.

Sources: humming-kernels 0.1.19, ``transform.py``: ``pack_e8m0_scale_for_fp16``, and ``prepare_fp16_e8m0_scale``, which moves the scales of
an expert up before that and which vLLM 0.33.0's conversion leaves out; ``arith/exp_offset.cuh``: E2M1 made fp16
lacks 2**14, of which the mainloop multiplies 2**12 in and the epilogue the rest, into results that are fp16 by then.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from references.loading import Matrix
from references.scales import over_columns

QUARTER = 2.0**-2  # what the epilogue finds of a result


def as_e5m0(scale: torch.Tensor) -> torch.Tensor:
    """``scale``, powers of two, in fp16's exponents: below 2**-14 zero, above 2**15 that."""
    return scale.clamp_max(2.0**15).masked_fill(scale < 2.0**-14, 0.0)


def lost(matrices: Iterable[Matrix]) -> float:
    """The share of its weights, by magnitude, that ``as_e5m0`` takes from the row that loses most. Every matrix has scales."""
    return max(float(_lost(matrix).max()) for matrix in matrices)


def _lost(matrix: Matrix) -> torch.Tensor:
    """[N]."""
    assert matrix.scale is not None
    columns = matrix.codes.shape[1]
    before, after = (
        (matrix.codes * over_columns(scale, matrix.width, columns)).abs().sum(1) for scale in (matrix.scale, as_e5m0(matrix.scale))
    )
    return torch.where(before > 0, 1.0 - after / before, 0.0)
