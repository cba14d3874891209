"""How much of a deviation a fault takes away, and whom it is granted to."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cases.case import Entry
from harness.faults import Fault
from harness.fit import _Seen, fit
from harness.tests.test_explained import FLAT, FUSED, WNA16, Pair

BIAS = Fault.BIAS_DROPPED


def test_where_nothing_is_wrong_no_fault_is_fitted() -> None:
    pair = Pair(FLAT, FUSED)
    assert fit(pair.inputs(), pair.answer, pair.stored(pair.numbers()), [Fault.W_SCALE_FLAT_INDEX]) == ()


@pytest.mark.parametrize(("share", "granted"), [(1.0, (1, 3)), (0.7, (1, 3)), (0.3, ()), (0.0, ())])
def test_a_fault_is_granted_to_the_experts_that_have_the_larger_part_of_it(share: float, granted: tuple[int, ...]) -> None:
    """0 has all of it, and the others ``share``."""
    pair = Pair(WNA16, Entry.LAYER)
    right, wrong = pair.numbers(), pair.numbers(BIAS)
    of_whom = pair.answer.routing.topk_ids.unsqueeze(2)
    has = torch.isin(of_whom, torch.tensor([1, 3])) * share + (of_whom == 0) * 1.0
    (found,) = fit(pair.inputs(), pair.answer, pair.stored(right + (wrong - right) * has), [BIAS])
    assert found.experts == (0, *granted)


def test_rows_count_alike_also_where_nothing_came_of_them() -> None:
    pair = Pair(FLAT, FUSED)
    large = torch.logspace(-3, 3, FLAT.tokens, dtype=torch.float64).unsqueeze(1)
    answer = replace(pair.answer, expected=torch.ones_like(pair.answer.expected) * large)
    nothing = torch.zeros(answer.expected.shape, dtype=torch.float16)
    assert _Seen.of(answer, nothing).excess(answer.expected).norm == pytest.approx(math.sqrt(2 * answer.expected.numel()), rel=1e-3)
