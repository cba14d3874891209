from __future__ import annotations

import pytest
import torch

from harness.pattern import pattern

IDS = [[0, 1], [1, 2], [2, 0], [3, 1], [0, 3], [2, 3]]


def said(rows: list[int], channels: list[int] | range = range(8), ids: list[list[int]] = IDS, dead: tuple[int, ...] = ()) -> str:
    bad = torch.zeros(len(ids), 8, dtype=torch.bool)
    for row in rows:
        bad[row, list(channels)] = True
    live = torch.ones_like(bad)
    live[list(dead)] = False
    return pattern(bad, live, torch.tensor(ids))


@pytest.mark.parametrize(
    ("rows", "channels", "says"),
    [
        ([], range(8), ""),
        (list(range(6)), range(8), "every element is bad"),
        ([3, 4, 5], range(8), "every bad token is routed to expert 3, and every token of expert 3 is bad"),
        ([0, 1, 2], range(8), "every token is bad except those of expert 3"),
        ([4], range(8), "only token 4"),
        ([3, 5], range(8), "every bad token is routed to expert 3 (2 of its 3 tokens)"),
        (list(range(6)), range(5, 8), "every token is bad; only channels ≥ 5"),
        (list(range(6)), [3], "every token is bad; only channel 3"),
        (list(range(6)), [2, 3, 4], "every token is bad; only channels 2 to 4"),
        (list(range(6)), [1, 3, 5, 7], "every token is bad; every second channel, from channel 1"),
        (list(range(6)), [0, 1, 2, 3, 5, 6, 7], "every token is bad; every channel except channel 4"),
        (list(range(6)), [0, 3, 4], "every token is bad; 3 of 8 channels"),
        ([3, 4, 5], [3], "every bad token is routed to expert 3, and every token of expert 3 is bad; only channel 3"),
        ([0, 2, 3, 4, 5], range(8), "every bad token is routed to one of experts 0 and 3, and every token of theirs is bad"),
    ],
)
def test_sentences(rows: list[int], channels: list[int] | range, says: str) -> None:
    assert said(rows, channels) == says


def test_a_zero_row_cannot_tell() -> None:
    assert said([0, 1, 2, 4, 5], dead=(3,)) == "every element that is not zero is bad"
    assert said([4, 5], dead=(3,)) == "every bad token is routed to expert 3, and every token of expert 3 is bad"


def test_tokens_in_a_row() -> None:
    ids = [[token % 2, 2] for token in range(6)]
    assert said([4, 5], ids=ids) == "only tokens ≥ 4"
    assert said([1, 2, 4], ids=ids) == "3 of 6 tokens are bad"
