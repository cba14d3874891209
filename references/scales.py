"""Scale layouts: which elements share a scale. Blocks are 128 x 128, groups 1 x 16 to 128; the last of a row or column may be shorter."""

from __future__ import annotations

import torch

from references.vocabulary import Layout

GROUP = 128  # columns of a GROUP128 group, rows and columns of a BLOCK128 block


def groups(size: int, width: int = GROUP) -> int:
    """Number of groups of ``width`` that cover ``size``, tail included."""
    return -(-size // width)


def over_columns(scale: torch.Tensor, width: int, cols: int) -> torch.Tensor:
    """Scales per group of ``width`` columns, [..., rows, groups] -> [..., rows, cols]; a single one stays [..., rows, 1]."""
    return scale if scale.shape[-1] == 1 else scale.repeat_interleave(width, -1)[..., :cols]


def scale_shape(layout: Layout, rows: int, cols: int) -> tuple[int, ...]:
    """Shape of the scale tensor of a [rows, cols] matrix."""
    match layout:
        case Layout.NONE | Layout.TENSOR:
            return ()
        case Layout.CHANNEL | Layout.TOKEN:
            return (rows, 1)
        case Layout.BLOCK128:
            return (groups(rows), groups(cols))
        case Layout.GROUP16 | Layout.GROUP32 | Layout.GROUP64 | Layout.GROUP128:
            return (rows, groups(cols, layout.width or GROUP))


def expand(scale: torch.Tensor, layout: Layout, rows: int, cols: int) -> torch.Tensor:
    """``scale`` in its layout's shape -> float64 that broadcasts against [rows, cols]: [1, 1], [rows, 1] or [rows, cols].

    Raises:
        ValueError: when the shape of ``scale`` is not the layout's.
    """
    shape = scale_shape(layout, rows, cols)
    if tuple(scale.shape) != shape:
        raise ValueError(f"{layout} scale of a [{rows}, {cols}] matrix must have shape {list(shape)}, got {list(scale.shape)}")
    wide = scale.to(torch.float64)
    match layout:
        case Layout.NONE | Layout.TENSOR:
            return wide.reshape(1, 1)
        case Layout.CHANNEL | Layout.TOKEN:
            return wide
        case Layout.BLOCK128:
            return wide.repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)[:, :cols]
        case Layout.GROUP16 | Layout.GROUP32 | Layout.GROUP64 | Layout.GROUP128:
            return wide.repeat_interleave(layout.width or GROUP, 1)[:, :cols]


def group_amax(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """max |x| over the elements that share a scale; x [rows, cols] -> the layout's scale shape, x's dtype. Empty groups give 0."""
    magnitude = x.abs()
    rows, cols = x.shape
    match layout:
        case Layout.NONE | Layout.TENSOR:
            return magnitude.amax() if magnitude.numel() else magnitude.new_zeros(())
        case Layout.CHANNEL | Layout.TOKEN:
            return magnitude.amax(1, keepdim=True)
        case Layout.GROUP16 | Layout.GROUP32 | Layout.GROUP64 | Layout.GROUP128:
            width = layout.width or GROUP
            padded = torch.nn.functional.pad(magnitude, (0, groups(cols, width) * width - cols))
            return padded.reshape(rows, groups(cols, width), width).amax(2)
        case Layout.BLOCK128:
            padded = torch.nn.functional.pad(magnitude, (0, groups(cols) * GROUP - cols, 0, groups(rows) * GROUP - rows))
            return padded.reshape(groups(rows), GROUP, groups(cols), GROUP).amax((1, 3))
