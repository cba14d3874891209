from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from references.packing import AWQ_ORDER, pack_nibbles, pack_words, unpack_nibbles, unpack_words

Pack = Callable[[torch.Tensor], torch.Tensor]


def codes(rows: int, cols: int, bits: int) -> torch.Tensor:
    index = torch.arange(rows * cols)
    mixed: torch.Tensor = (index * 7 + index // 5) % 2**bits
    return mixed.to(torch.uint8).reshape(rows, cols)


def nibbles_one_by_one(x: torch.Tensor) -> torch.Tensor:
    rows, cols = x.shape
    return torch.tensor([[int(x[r, c]) + 16 * int(x[r, c + 1]) for c in range(0, cols, 2)] for r in range(rows)], dtype=torch.uint8)


def words_one_by_one(x: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Along columns, from the definition."""
    per_word = 32 // bits
    rows = []
    for row in x.tolist():
        words = []
        for start in range(0, len(row), per_word):
            part = row[start : start + per_word]
            part = part if order is None else [part[i] for i in order]
            words.append(int.from_bytes(sum(code << bits * i for i, code in enumerate(part)).to_bytes(4, "little"), "little", signed=True))
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


def check_nibbles(pack: Pack) -> None:
    x = codes(16, 32, 4)
    assert set(x.flatten().tolist()) == set(range(16))
    assert torch.equal(pack(x), nibbles_one_by_one(x))


def check_words(pack: Pack, bits: int, dim: int, order: tuple[int, ...] | None) -> None:
    x = codes(32, 64, bits)
    lines = x if dim == 1 else x.T
    expected = words_one_by_one(lines, bits, order)
    packed = pack(x)
    assert packed.dtype is torch.int32
    assert torch.equal(packed, expected if dim == 1 else expected.T)


ORDERS = [(4, 1, None), (4, 0, None), (8, 1, None), (8, 0, None), (4, 1, AWQ_ORDER)]


def test_nibbles() -> None:
    check_nibbles(pack_nibbles)
    x = codes(3, 64, 4)
    assert torch.equal(unpack_nibbles(pack_nibbles(x)), x)
    assert pack_nibbles(torch.tensor([[1, 2]], dtype=torch.uint8)).tolist() == [[0x21]]


@pytest.mark.parametrize(("bits", "dim", "order"), ORDERS)
def test_words(bits: int, dim: int, order: tuple[int, ...] | None) -> None:
    check_words(lambda x: pack_words(x, bits, dim, order), bits, dim, order)
    x = codes(32, 64, bits)
    assert torch.equal(unpack_words(pack_words(x, bits, dim, order), bits, dim, order), x)


def test_orders_by_hand() -> None:
    eight = torch.arange(8, dtype=torch.uint8).reshape(1, 8)
    assert pack_words(eight, 4, 1).tolist() == [[0x76543210]]
    assert pack_words(eight, 4, 1, AWQ_ORDER).tolist() == [[0x75316420]]  # AutoAWQ: 0 2 4 6 1 3 5 7 from the lowest bits up
    assert pack_words(eight.T.contiguous(), 4, 0).tolist() == [[0x76543210]]
    assert pack_words(torch.full((1, 4), 0xFF, dtype=torch.uint8), 8, 1).tolist() == [[-1]]


def test_every_wrong_order_fails() -> None:
    with pytest.raises(AssertionError):
        check_nibbles(lambda x: pack_nibbles(x.reshape(-1, 2).flip(1).reshape(x.shape)))  # odd column in the low nibble
    with pytest.raises(AssertionError):
        check_words(lambda x: pack_words(x, 4, 1), 4, 1, AWQ_ORDER)
    with pytest.raises(AssertionError):
        check_words(lambda x: pack_words(x, 4, 1, AWQ_ORDER), 4, 1, None)
    with pytest.raises(AssertionError):  # the reverse permutation
        check_words(lambda x: pack_words(x, 4, 1, (0, 4, 1, 5, 2, 6, 3, 7)), 4, 1, AWQ_ORDER)
    with pytest.raises(AssertionError):
        check_words(lambda x: pack_words(x.T.contiguous(), 4, 1).T, 4, 1, None)


def test_sizes_that_do_not_fill_a_word_are_refused() -> None:
    with pytest.raises(ValueError, match="8 codes share a word: size 12 of dimension 1"):
        pack_words(codes(2, 12, 4), 4, 1)
    with pytest.raises(ValueError, match="K must be even, got 3"):
        pack_nibbles(codes(2, 3, 4))
