"""One rank's part of a layer: rows of gate and up, columns of down; the sum of all ranks' outputs is the layer's output.

Tensor parallelism as Megatron-LM defines it for an MLP (Shoeybi et al. 2019, section 3): the first weight is cut along its output, the
second along its input, and results are added. The bias of the second enters the sum once.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

from references.moe import Expert, Projection
from references.scales import GROUP
from references.vocabulary import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

_GROUPS = {layout.width: layout for layout in (Layout.GROUP16, Layout.GROUP32, Layout.GROUP64, Layout.GROUP128)}


def shard(experts: Sequence[Expert], rank: int, ranks: int) -> tuple[Expert, ...]:
    """Rank ``rank`` of ``ranks``. Only rank 0 has the down projection's bias.

    Where a shard would begin or end within a group, groups are made narrower and their scales repeated, which changes no weight; blocks
    are made so of both weights.

    Raises:
        ValueError: the intermediate size cannot be divided, or no layout has groups so narrow.
    """
    return tuple(
        Expert(
            gate=None if expert.gate is None else _rows(expert.gate, rank, ranks),
            up=_rows(expert.up, rank, ranks),
            down=_columns(expert.down, rank, ranks),
        )
        for expert in experts
    )


def _range(size: int, rank: int, ranks: int) -> slice:
    if size % ranks:
        raise ValueError(f"an intermediate size of {size} cannot be divided among {ranks} ranks")
    return slice(size // ranks * rank, size // ranks * (rank + 1))


def _rows(projection: Projection, rank: int, ranks: int) -> Projection:
    mine = _range(projection.codes.shape[0], rank, ranks)
    if projection.layout is Layout.BLOCK128 and (mine.stop - mine.start) % GROUP:
        projection = _narrower(projection, gcd(GROUP, mine.stop - mine.start))
    scale, zero_point = projection.scale, projection.zero_point
    if scale is not None and projection.layout is Layout.BLOCK128:
        scale = scale[mine.start // GROUP : mine.stop // GROUP]
    elif scale is not None and projection.layout is not Layout.TENSOR:
        scale = scale[mine]
    bias = None if projection.bias is None else projection.bias[mine]
    return replace(
        projection, codes=projection.codes[mine], scale=scale, bias=bias, zero_point=None if zero_point is None else zero_point[mine]
    )


def _columns(projection: Projection, rank: int, ranks: int) -> Projection:
    mine = _range(projection.codes.shape[1], rank, ranks)
    bias = projection.bias if rank == 0 else None
    width = projection.layout.width
    if width is None:
        return replace(projection, codes=projection.codes[:, mine], bias=bias)
    if (mine.stop - mine.start) % width:
        projection = _narrower(projection, gcd(width, mine.stop - mine.start))
        width = projection.layout.width
    assert width is not None
    assert projection.scale is not None
    groups = slice(mine.start // width, mine.stop // width)
    point = projection.zero_point
    return replace(
        projection,
        codes=projection.codes[:, mine],
        scale=projection.scale[:, groups],
        bias=bias,
        zero_point=None if point is None else point[:, groups],
    )


def _as_groups(projection: Projection) -> Projection:
    """128 x 128 blocks as groups of 128 columns of each row."""
    assert projection.scale is not None
    return replace(
        projection, layout=Layout.GROUP128, scale=projection.scale.repeat_interleave(GROUP, 0)[: projection.codes.shape[0]].contiguous()
    )


def _narrower(projection: Projection, width: int) -> Projection:
    if projection.layout is Layout.BLOCK128:
        projection = _as_groups(projection)
    if width not in _GROUPS:
        raise ValueError(f"no layout has groups of {width} columns")
    assert projection.layout.width is not None
    assert projection.scale is not None
    times, point = projection.layout.width // width, projection.zero_point
    return replace(
        projection,
        layout=_GROUPS[width],
        scale=projection.scale.repeat_interleave(times, 1),
        zero_point=None if point is None else point.repeat_interleave(times, 1),
    )
