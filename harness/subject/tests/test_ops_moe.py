"""Routing and bookkeeping operators against their definitions."""

from __future__ import annotations

import pytest
import torch

from harness.subject.interpreter import ops_moe

EXPERTS = (1, 2, 3, 4, 5, 8, 40, 60, 64, 128, 192, 512, 600)


def _routed(logits: torch.Tensor, top_k: int, renormalize: bool, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    rows = logits.shape[0]
    weights, ids = torch.zeros(rows, top_k), torch.zeros(rows, top_k, dtype=torch.int32)
    source = torch.zeros_like(ids)
    ops_moe.topk_softmax(weights, ids, source, logits, renormalize, bias)
    assert source.tolist() == [[slot * rows + row for slot in range(top_k)] for row in range(rows)]
    return weights, ids


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_of_every_reduction_tree(experts: int, renormalize: bool) -> None:
    logits = torch.randn(7, experts, generator=torch.Generator().manual_seed(experts))
    top_k = min(2, experts)
    weights, ids = _routed(logits, top_k, renormalize)
    probability = torch.softmax(logits.double(), -1)
    value, index = probability.topk(top_k, -1)
    if renormalize:
        value = value / value.sum(-1, keepdim=True)
    assert torch.equal(ids.long(), index)
    assert (weights.double() - value).abs().max() < 16 * 2.0**-24  # a sum of E terms, three more roundings


def test_a_row_sum_adds_every_expert_once() -> None:
    for experts in EXPERTS:
        ones = torch.ones(2, experts)
        assert ops_moe._row_sum(ones).flatten().tolist() == [experts, experts]


def test_ties_go_to_the_lower_expert_and_bias_only_steers() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    assert _routed(logits, 2, True)[1].tolist() == [[1, 2]]
    assert _routed(torch.zeros(3, 600), 5, True)[1].tolist() == [[0, 1, 2, 3, 4]] * 3
    weights, ids = _routed(logits, 1, False, torch.tensor([10.0, 0.0, 0.0, 0.0]))
    assert ids.tolist() == [[0]]
    assert weights.item() == pytest.approx(torch.softmax(logits, -1)[0, 0].item(), rel=1e-6)


def test_a_row_of_nan_routes_to_the_first_experts() -> None:
    weights, ids = _routed(torch.full((1, 4), float("nan")), 2, True)
    assert (weights.tolist(), ids.tolist()) == ([[0.0, 0.0]], [[0, 1]])


def _aligned(topk_ids: list[list[int]], experts: int, block: int, expert_map: list[int] | None = None) -> tuple[list[int], list[int], int]:
    ids = torch.tensor(topk_ids, dtype=torch.int32)
    longest = ids.numel() + experts * (block - 1)
    rows, blocks, total = (torch.full((n,), -7, dtype=torch.int32) for n in (longest, -(-longest // block), 1))
    mapping = None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32)
    ops_moe.moe_align_block_size(ids, experts, block, rows, blocks, total, mapping)
    return rows.tolist(), blocks.tolist(), int(total.item())


def test_alignment_of_the_documented_example() -> None:
    """moe_align_block_size.py's own example, with its experts 1..4 named 0..3."""
    rows, blocks, total = _aligned([[1, 2, 3], [0, 1, 3], [0, 2, 3], [0, 1, 2]], 4, 4)
    assert total == 16
    assert rows[:16] == [3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12]
    assert blocks[:4] == [0, 1, 2, 3]
    assert set(blocks[4:]) == {-1}
    assert set(rows[16:]) == {12}


def test_empty_and_foreign_experts_take_no_block() -> None:
    rows, blocks, total = _aligned([[0], [3], [3], [9]], 4, 2)
    assert (total, blocks[:2], rows[:4]) == (4, [0, 3], [0, 4, 1, 2])
    rows, blocks, total = _aligned([[0], [1], [2]], 3, 2, [-1, 0, 1])
    assert (total, blocks[:2], rows[:4]) == (4, [0, 1], [1, 3, 2, 3])


def test_the_sum_is_float32_and_rounds_once() -> None:
    x = torch.tensor([[[256.0], [1.0], [1.0]]], dtype=torch.bfloat16)
    out = torch.zeros(1, 1, dtype=torch.bfloat16)
    ops_moe.moe_sum(x, out)
    assert out.item() == 258.0  # adding in bfloat16 would stay at 256


def test_the_sum_skips_slots_of_other_ranks() -> None:
    x, out = torch.tensor([[[1.0], [2.0], [4.0]]]), torch.zeros(1, 1)
    ops_moe.moe_sum(x, out, torch.tensor([[0, -1, 1]]), torch.tensor([5, -1]))
    assert out.item() == 1.0
