"""Routing and expert bookkeeping (csrc/libtorch_stable/moe/topk_softmax_kernels.cu, moe_align_sum_kernels.cu)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def _row_sum(exponentials: torch.Tensor) -> torch.Tensor:
    """Sum over experts [M, E] -> [M, 1] in the order the kernels add.

    E a power of two up to 512 (or one of 192, 320, 384, 448, 576): a thread adds its own loads in order, threads add by
    butterfly. Otherwise a block of 256 threads adds strided columns, then reduces by warp shuffles.
    """
    rows, experts = exponentials.shape
    if experts & (experts - 1) == 0 and experts <= 512:
        vector = min(4, experts)  # 16-byte loads of float32
    elif experts in (192, 320, 384, 448, 576):
        vector = 2
    else:
        padded = torch.zeros(rows, -(-experts // 256) * 256)
        padded[:, :experts] = exponentials
        threads = padded.reshape(rows, -1, 256)
        total = threads[:, 0]
        for step in range(1, threads.shape[1]):
            total = total + threads[:, step]
        lanes = total.reshape(rows, 8, 32)
        for offset in (1, 2, 4, 8, 16):  # WarpReduce: lane i takes lane i + offset
            shifted = torch.zeros_like(lanes)
            shifted[..., : 32 - offset] = lanes[..., offset:]
            lanes = lanes + shifted
        warps = lanes[..., 0]
        total = warps[:, 0]
        for warp in range(1, 8):
            total = total + warps[:, warp]
        return total[:, None]
    threads_per_row = min(32, experts // vector)
    loads = exponentials.reshape(rows, -1, threads_per_row, vector)  # load, thread, element
    total = torch.zeros(rows, threads_per_row)
    for load in range(loads.shape[1]):
        for element in range(vector):
            total = total + loads[:, load, :, element]
    mask = threads_per_row // 2
    while mask:
        total = total + total[:, torch.arange(threads_per_row) ^ mask]
        mask //= 2
    return total[:, :1]


def topk_softmax(
    weights: torch.Tensor,
    ids: torch.Tensor,
    token_expert_indices: torch.Tensor,
    logits: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> None:
    """Softmax over experts, the k largest in descending order, ties to the lower id; ``bias`` steers the choice only.

    weights [M, k] float32, ids [M, k] int32/int64/uint32, logits [M, E]. p = exp(l - max) * (1 / sum); renormalized weights are
    p * (1 / sum of the chosen p, in order of choice).
    """
    if is_padding is not None:
        raise NotImplementedError("topk_softmax with is_padding has no CPU implementation in the interpreter lane")
    values = logits.float()
    exponentials = torch.exp(values - values.amax(-1, keepdim=True))
    probability = exponentials * (1.0 / _row_sum(exponentials))
    probability = torch.where(torch.isfinite(probability), probability, torch.zeros_like(probability))
    choice = probability if bias is None else probability + bias.float()
    top_k = weights.shape[1]
    order = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = torch.gather(probability, 1, order)
    if renormalize:
        total = torch.zeros(chosen.shape[0])
        for slot in range(top_k):
            total = total + chosen[:, slot]
        chosen = chosen * (1.0 / torch.where(total > 0, total, torch.ones_like(total)))[:, None]
    weights.copy_(chosen)
    ids.copy_(order.to(ids.dtype))
    rows = logits.shape[0]
    token_expert_indices.copy_((torch.arange(top_k)[None, :] * rows + torch.arange(rows)[:, None]).to(token_expert_indices.dtype))


def moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    scatter_idx: torch.Tensor | None = None,
) -> None:
    """Rows (token * k + slot) sorted by expert, each expert padded to a multiple of ``block_size`` with topk_ids.numel().

    expert_ids holds each block's expert and -1 after the last. Ids outside [0, E), or mapped to -1, take no part.
    """
    flat = topk_ids.reshape(-1).long()
    valid = (flat >= 0) & (flat < num_experts)
    local = torch.where(valid, flat, torch.full_like(flat, -1))
    if expert_map is not None:
        local = torch.where(valid, expert_map.long()[flat.clamp(0, num_experts - 1)], local)
    sorted_token_ids.fill_(flat.numel())
    expert_ids.fill_(-1)
    start = 0
    for expert in range(num_experts):
        rows = (local == expert).nonzero().flatten()
        blocks = -(-rows.numel() // block_size)
        sorted_token_ids[start : start + rows.numel()] = rows.to(sorted_token_ids.dtype)
        expert_ids[start // block_size : start // block_size + blocks] = expert
        start += blocks * block_size
    num_tokens_post_pad.fill_(start)
    if scatter_idx is not None:
        index = torch.arange(flat.numel())
        scatter_idx.copy_(torch.where(local >= 0, index, torch.full_like(index, -1)).to(scatter_idx.dtype).reshape(scatter_idx.shape))


def moe_sum(x: torch.Tensor, out: torch.Tensor, topk_ids: torch.Tensor | None = None, expert_map: torch.Tensor | None = None) -> None:
    """out[m] = sum over slots of x[m, slot], float32, slot by slot, rounded once. Slots without a local expert are skipped."""
    total = torch.zeros(x.shape[0], x.shape[2])
    for slot in range(x.shape[1]):
        part = x[:, slot].float()
        if topk_ids is not None:
            ids = topk_ids[:, slot].long()
            present = ids >= 0
            if expert_map is not None:
                present &= expert_map.long()[ids.clamp(min=0)] >= 0
            part = torch.where(present[:, None], part, torch.zeros_like(part))
        total = total + part
    out.copy_(total.to(out.dtype))


IMPLEMENTATIONS: dict[str, Callable[..., object]] = {
    "_moe_C::moe_align_block_size": moe_align_block_size,
    "_moe_C::moe_sum": moe_sum,
    "_moe_C::topk_softmax": topk_softmax,
}
