from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from references.scales import expand, group_amax, scale_shape
from references.vocabulary import Layout

GROUPS = (Layout.GROUP16, Layout.GROUP32, Layout.GROUP64, Layout.GROUP128)
LAYOUTS = (Layout.TENSOR, Layout.CHANNEL, Layout.TOKEN, Layout.BLOCK128, *GROUPS)


def owner(layout: Layout, row: int, col: int) -> tuple[int, ...]:
    """Index of the scale that covers element (row, col), spelled out."""
    return {
        Layout.TENSOR: (),
        Layout.CHANNEL: (row, 0),
        Layout.TOKEN: (row, 0),
        Layout.BLOCK128: (row // 128, col // 128),
        **{group: (row, col // int(group.removeprefix("group"))) for group in GROUPS},
    }[layout]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (128, 128), (129, 255), (130, 300), (3, 127)])
def test_every_element_gets_its_own_scale(layout: Layout, rows: int, cols: int) -> None:
    shape = scale_shape(layout, rows, cols)
    scale = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)  # all distinct: a transposed index cannot hide
    wide = expand(scale, layout, rows, cols).expand(rows, cols)
    for row in {0, rows // 2, min(127, rows - 1), rows - 1}:
        for col in {0, cols // 2, min(127, cols - 1), min(128, cols - 1), cols - 1}:
            assert wide[row, col] == scale[owner(layout, row, col)]


@given(st.sampled_from(LAYOUTS), st.integers(1, 260), st.integers(1, 260), st.integers(0, 2**20))
def test_amax_is_the_largest_magnitude_of_each_group(layout: Layout, rows: int, cols: int, seed: int) -> None:
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    amax = group_amax(x, layout)
    wide = expand(amax, layout, rows, cols).expand(rows, cols)
    assert (x.abs() <= wide).all()
    for index in {owner(layout, 0, 0), owner(layout, rows - 1, cols - 1)}:
        members = (
            [float(x[r, c].abs()) for r in range(rows) for c in range(cols) if owner(layout, r, c) == index]
            if rows * cols < 2000
            else [float(amax[index])]
        )
        assert float(amax[index]) == max(members)


def test_a_wrong_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"block128 scale of a \[130, 10\] matrix must have shape \[2, 1\], got \[1, 1\]"):
        expand(torch.ones(1, 1), Layout.BLOCK128, 130, 10)
