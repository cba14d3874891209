"""Humming's weight operators on the CPU, against the element-wise description of its layout."""

from __future__ import annotations

import pytest
import torch

from harness.subject.interpreter.ops_humming import pack_weight, packed, repack_weight, unpack_weight, unpacked
from references.humming_layout import column_scales, weight_codes

NOTHING = torch.empty(0, dtype=torch.int32)


def codes(bits: int, *shape: int) -> torch.Tensor:
    """Every code occurs, in an order with no period that a layout has."""
    count = torch.arange(torch.Size(shape).numel())
    return ((count * 2654435761 >> 7) % (1 << bits)).reshape(shape).to(torch.int32)


@pytest.mark.parametrize("bits", range(1, 9))
def test_packing_is_one_little_endian_stream(bits: int) -> None:
    given = codes(bits, 2, 3, 64)
    words = pack_weight(given, NOTHING, bits)
    for row, stream in zip(given.flatten(0, 1).tolist(), words.flatten(0, 1).tolist(), strict=True):
        assert sum(code << bits * place for place, code in enumerate(row)) == sum((word % 2**32) << 32 * i for i, word in enumerate(stream))
    assert torch.equal(unpack_weight(words, NOTHING, bits), given)
    filled = torch.zeros_like(words)
    assert pack_weight(given, filled, bits).numel() == 0
    assert torch.equal(filled, words)


WIDTHS = [(8, 16), (4, 16), (2, 16), (8, 8), (4, 8)]


@pytest.mark.parametrize(
    ("bits", "activation_bits", "columns"), [*((b, a, k) for b, a in WIDTHS for k in (64, 192)), (8, 16, 96), (4, 4, 128), (4, 4, 256)]
)
def test_every_code_is_where_the_layout_says(bits: int, activation_bits: int, columns: int) -> None:
    given = codes(bits, 2, 128, columns)
    words = repack_weight(packed(given, bits), NOTHING, bits, activation_bits, True)
    assert words.shape == (2, columns * activation_bits // 256, 128 * bits * 8 // activation_bits)
    assert torch.equal(weight_codes(words, 128, columns, bits=bits, activation_bits=activation_bits), given.long())
    unpacked_input = repack_weight(given, NOTHING, bits, activation_bits, False)
    assert torch.equal(unpacked_input, words)


@pytest.mark.parametrize(("rows", "columns", "activation_bits"), [(64, 96, 8), (64, 48, 16), (64, 64, 4), (96, 64, 16)])
def test_what_the_kernel_asserts_is_raised(rows: int, columns: int, activation_bits: int) -> None:
    with pytest.raises(RuntimeError, match="which weight_repack_nk asserts"):
        repack_weight(packed(codes(4, 1, rows, columns), 4), NOTHING, 4, activation_bits, True)


def test_one_moved_code_is_seen() -> None:
    given = codes(8, 1, 64, 64)
    words = repack_weight(packed(given, 8), NOTHING, 8, 16, True)
    words[0, 0, 0] ^= 1
    assert int((weight_codes(words, 64, 64, bits=8, activation_bits=16) != given).sum()) == 1


def test_offset_binary_becomes_sign_and_distance() -> None:
    given = torch.arange(256, dtype=torch.int32).repeat(16).reshape(1, 64, 64)
    words = repack_weight(packed(given, 8), NOTHING, 8, 16, True, should_preprocess_for_int2fp=True)
    found = weight_codes(words, 64, 64, bits=8, activation_bits=16)
    assert torch.equal(torch.where(found < 128, found + 128, 255 - found), given.long())


def test_a_layout_without_a_stand_in_is_named() -> None:
    with pytest.raises(NotImplementedError, match="humming::repack_weight"):
        repack_weight(packed(codes(8, 1, 64, 64), 8), NOTHING, 8, 8, True, use_packed_k_layout=True)


def test_too_few_words() -> None:
    with pytest.raises(ValueError, match="cannot hold 64 x 64"):
        weight_codes(torch.zeros(1, 4, 8, dtype=torch.int32), 64, 64, bits=8, activation_bits=16)


def test_unpacking_keeps_the_sign_bit_of_a_word() -> None:
    assert unpacked(torch.tensor([-1], dtype=torch.int32), 8).tolist() == [255, 255, 255, 255]


@pytest.mark.parametrize("on_result", [True, False])
def test_scales_are_dealt_out_in_whole_tiles(on_result: bool) -> None:
    numbers = torch.arange(128.0).reshape(1, 1, 128)
    found = column_scales(numbers, 128, on_result=on_result)
    assert sorted(found.flatten().tolist()) == numbers.flatten().tolist()
    assert torch.equal(found.flatten()[64:], found.flatten()[:64] + 64)
