"""Humming's weight operators on the CPU: bit packing, and the order in which its GEMM reads weights.

humming-kernels 0.1.19, ``include/humming/kernel/{pack_weight,process}.cuh``. Both only move bits. A row of B-bit codes is one
little-endian bit stream in int32 words. Repacking takes tiles of 64 x 64 codes apart so that each of 32 threads finds the
codes of its tensor-core operands in consecutive words; A is the activations' width in bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

TILE = 64


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes (uint8) of little-endian streams: int32 [..., n] -> [..., n * 32 / bits]."""
    eights = words.contiguous().view(torch.uint8)
    if 8 % bits == 0:
        split = eights.unsqueeze(-1) >> torch.arange(0, 8, bits, dtype=torch.uint8)
        return (split & (1 << bits) - 1).flatten(-2)
    single = eights.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return (single.flatten(-2).unflatten(-1, (-1, bits)) << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of ``unpacked``, for whole words; bits of a code above its width are dropped."""
    codes = codes.to(torch.uint8)
    if 8 % bits == 0:
        split = (codes & (1 << bits) - 1).unflatten(-1, (-1, 8 // bits)) << torch.arange(0, 8, bits, dtype=torch.uint8)
        eights = split.sum(-1, dtype=torch.uint8)
    else:
        single = codes.unsqueeze(-1) >> torch.arange(bits, dtype=torch.uint8) & 1
        eights = (single.flatten(-2).unflatten(-1, (-1, 8)) << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    return eights.contiguous().view(torch.int32)


def _stored(result: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """humming/ops/utils.py: an output that is given is filled, and an empty tensor returned."""
    if outputs.numel() == 0:
        return result
    outputs.copy_(result)
    return outputs.new_empty(0)


def pack_weight(inputs: torch.Tensor, outputs: torch.Tensor, num_bits: int) -> torch.Tensor:
    """int32 codes [..., K] -> int32 words [..., K * bits / 32]."""
    return _stored(packed(inputs, num_bits), outputs)


def unpack_weight(inputs: torch.Tensor, outputs: torch.Tensor, num_bits: int) -> torch.Tensor:
    """int32 words [..., K * bits / 32] -> int32 codes [..., K]."""
    return _stored(unpacked(inputs, num_bits).to(torch.int32), outputs)


def _interleaved(bits: int, activation_bits: int) -> list[int]:
    """Of the codes of one word, which one is kept at each place: those of one operand register sit ``stride`` apart."""
    in_word, stride = 32 // bits, 32 // activation_bits
    group = in_word // stride
    return [place % group * stride + place // group for place in range(in_word)]


def operand_order(codes: torch.Tensor, activation_bits: int) -> torch.Tensor:
    """[E, N, K] in the order of the words: [E, K * A / 256, N / 64, 16 / A, 32 threads, 32 codes]. N % 64 == 0; K is filled up with 0."""
    a = activation_bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % TILE))
    experts, rows, columns = codes.shape
    split = codes.reshape(experts, rows // TILE, 16 // a, a // 4, 2, 8, columns // TILE, a // 4, 2, 4, 32 // a)
    # row: tile, i2, i3, i4, thread / 4; column: tile, i1, i5, thread % 4, i6; names of process.cuh
    ordered = split.permute(0, 6, 7, 1, 2, 5, 9, 3, 4, 8, 10)
    return ordered.reshape(experts, columns * a // 256, rows // TILE, 16 // a, 32, 32)


def repack_weight(
    inputs: torch.Tensor,
    outputs: torch.Tensor,
    weight_bits: int,
    activation_bits: int,
    is_weight_packed: bool,
    should_preprocess_for_int2fp: bool = False,
    should_preprocess_with_zp: bool = False,
    use_fused_e8m0_scale: bool = False,
    interleave_mode: int = 3,
    group_size_zp: int = 0,
    padded_shape_n: int | None = None,
    padded_shape_k: int | None = None,
    zero_point: torch.Tensor | None = None,
    use_packed_k_layout: bool = False,
    use_native_dequant: bool = False,
) -> torch.Tensor:
    """int32 words [E, N, K * B / 32] -> [E, K * A / 256, N * B * 8 / A]. B divides 32; no zero point, no packed-K layout.

    Raises:
        RuntimeError: N is no multiple of 64, or K none of 512 / A: an assertion in the kernel, which ends a CUDA context.
    """
    if should_preprocess_with_zp or use_packed_k_layout or use_fused_e8m0_scale or padded_shape_n or padded_shape_k or 32 % weight_bits:
        raise NotImplementedError("Could not run 'humming::repack_weight' with arguments from the 'CPU' backend in this layout")
    codes = unpacked(inputs, weight_bits) if is_weight_packed else inputs.to(torch.uint8)
    codes = codes if codes.dim() == 3 else codes.unsqueeze(0)
    for name, size, tile in (("N", codes.shape[-2], TILE), ("K", codes.shape[-1], 512 // activation_bits)):
        if size % tile:
            raise RuntimeError(f"humming::repack_weight: {name} = {size} is no multiple of {tile}, which weight_repack_nk asserts")
    rows = codes.shape[-1] * activation_bits // 256
    if should_preprocess_for_int2fp:  # offset binary: sign and distance, so that the sign can be moved into a float
        middle, mask = 1 << (weight_bits - 1), (1 << weight_bits) - 1
        codes = torch.where(codes >= middle, codes - middle, mask - codes)
    words = operand_order(codes, activation_bits)[:, :rows].unflatten(-1, (-1, 32 // weight_bits))
    if not use_native_dequant:
        moved = words[..., _interleaved(weight_bits, activation_bits)]
        sign = 1 << (weight_bits - 1)
        below, top = (moved if interleave_mode % 2 else words), (moved if interleave_mode // 2 else words)
        words = (below & (sign - 1)) | (top & sign)
    result = packed(words.flatten(-2), weight_bits).reshape(codes.shape[0], rows, -1)
    return _stored(result if inputs.dim() == 3 else result.squeeze(0), outputs)


IMPLEMENTATIONS: dict[str, Callable[..., object]] = {
    "humming::pack_weight": pack_weight,
    "humming::unpack_weight": unpack_weight,
    "humming::repack_weight": repack_weight,
}
