"""Every code at every place of every form, against what a file's writer packs; every place is the only one that moves its code."""

from __future__ import annotations

import pytest
import torch

from references import loaded_forms as forms
from references.packing import AWQ_ORDER, pack_nibbles, pack_words

N, K, G = 16, 48, 3


def every(rows: int, columns: int, bits: int) -> torch.Tensor:
    """Each code at least once in each row that is long enough, in another order in each."""
    return ((torch.arange(rows).unsqueeze(1) * 5 + torch.arange(columns) * 7) % (1 << bits)).to(torch.uint8)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_along_columns(bits: int) -> None:
    wanted = every(N, K, bits)
    words = pack_words(wanted, bits, 1)
    assert torch.equal(forms.codes(words, bits, N, K), wanted.long())
    assert torch.equal(forms.codes(words.T, bits, N, K), wanted.long())


def test_codes_in_awqs_order() -> None:
    wanted = every(N, K, 4)
    assert torch.equal(forms.codes(pack_words(wanted.T, 4, 1, AWQ_ORDER), 4, N, K, awq=True), wanted.long())


def test_codes_as_bytes() -> None:
    assert torch.equal(forms.codes(pack_nibbles(every(N, K, 4)), 4, N, K), every(N, K, 4).long())
    assert torch.equal(forms.codes(every(N, K, 8), 8, N, K), every(N, K, 8).long())


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_along_rows(bits: int) -> None:
    wanted = every(N, G, bits)
    assert torch.equal(forms.zero_points(pack_words(wanted, bits, 0), bits, N, G), wanted.long())


def test_zero_points_in_awqs_order_and_as_bytes() -> None:
    wanted = every(N, G, 4)
    assert torch.equal(forms.zero_points(pack_words(wanted.T, 4, 1, AWQ_ORDER), 4, N, G, awq=True), wanted.long())
    assert torch.equal(forms.zero_points(pack_nibbles(wanted.T).T, 4, N, G), wanted.long())
    assert torch.equal(forms.zero_points(every(N, G, 8), 8, N, G), every(N, G, 8).long())


def test_scales_either_way() -> None:
    wanted = torch.arange(N * G).reshape(N, G).float()
    assert torch.equal(forms.scales(wanted, N, G), wanted)
    assert torch.equal(forms.scales(wanted.T, N, G), wanted)


@pytest.mark.parametrize("place", [(n, k) for n in (0, 1, 7, 15) for k in (0, 1, 5, 8, 47)])
def test_one_place_is_one_code(place: tuple[int, int]) -> None:
    alone = torch.zeros(N, K, dtype=torch.uint8)
    alone[place] = 15
    for held, awq in ((pack_words(alone, 4, 1), False), (pack_words(alone.T, 4, 1, AWQ_ORDER), True), (pack_nibbles(alone), False)):
        assert forms.codes(held, 4, N, K, awq=awq).nonzero().tolist() == [list(place)]


def test_other_forms_are_refused() -> None:
    with pytest.raises(ValueError, match="no 16 x 48 codes of 4 bits"):
        forms.codes(torch.zeros(N, K, dtype=torch.uint8), 4, N, K)
    with pytest.raises(ValueError, match="no 16 x 3 zero points of 4 bits"):
        forms.zero_points(torch.zeros(N, G, dtype=torch.uint8), 4, N, G)
    with pytest.raises(ValueError, match="no 16 x 3 scales"):
        forms.scales(torch.zeros(N, 2), N, G)
