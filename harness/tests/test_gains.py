from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cases.batch import make_batch
from cases.case import Entry, MoECase
from cases.checkpoint import make_checkpoint
from harness.backends import Backend
from harness.expected import expected
from harness.gains import Group, gains, per_expert
from harness.inject_gains import gained
from harness.recipes import recipe
from harness.tests.worked import answer, normal
from references.formats import torch_dtype
from references.moe import Answer
from references.vocabulary import Format

TOP1 = [[0], [1], [2], [2], [0], [1], [2], [2]]
TOP2 = [[0, 1], [1, 2], [2, 0], [0, 1], [1, 2], [2, 0], [0, 2], [1, 0]]


def ramp(tokens: int, slots: int, hidden: int = 128, seed: int = 0) -> torch.Tensor:
    """Contributions whose tokens differ in magnitude by 2**10."""
    magnitude = torch.logspace(-5, 5, tokens, base=2, dtype=torch.float64).reshape(-1, 1, 1)
    return normal(tokens, slots, hidden, seed=seed) * magnitude


def stored(given: torch.Tensor, output: Format) -> torch.Tensor:
    return given.sum(1).to(torch_dtype(output))


@pytest.mark.parametrize("output", [Format.BF16, Format.FP16, Format.FP32])
@pytest.mark.parametrize("ids", [TOP1, TOP2])
def test_roundings_alone_are_never_flagged(output: Format, ids: list[list[int]]) -> None:
    for seed in range(20):
        given = ramp(8, len(ids[0]), seed=seed)
        found = gains(answer(given, ids, output=output), stored(given, output), 4)
        assert found.flagged() == ()
        assert math.isnan(found.expert.alpha[3])  # nobody is routed to it


@pytest.mark.parametrize("ids", [TOP1, TOP2])
def test_a_gain_of_one_expert_is_found_on_it_alone(ids: list[list[int]]) -> None:
    given = ramp(8, len(ids[0]))
    honest = answer(given, ids)
    found = gains(honest, stored(gained(given, honest.routing, 1.008, expert=2), Format.BF16), 4)
    assert [gain.index for gain in found.expert.flagged()] == [(2,)]
    assert found.expert.alpha[2] == pytest.approx(1.008, abs=float(6 * found.expert.se[2]))
    assert found.expert.smallest()[2] < 0.002


@pytest.mark.parametrize("ids", [TOP1, TOP2])
def test_a_gain_of_one_channel_is_found_first(ids: list[list[int]]) -> None:
    given = ramp(8, len(ids[0]))
    honest = answer(given, ids)
    found = gains(honest, stored(gained(given, honest.routing, 1.05, expert=2, channel=7), Format.BF16), 4)
    best = found.channel.flagged()[0]
    assert (best.group, best.index) == (Group.CHANNEL, (2, 7))
    assert all(gain.index[1] == 7 for gain in found.channel.flagged())


def test_a_small_token_counts_as_much_as_a_large_one() -> None:
    given = ramp(8, 1)
    actual = given.sum(1)
    actual[0] *= 1.01  # the smallest row, 2**-10 of the largest
    found = gains(answer(given, TOP1), actual.bfloat16(), 4)
    assert [gain.index for gain in found.token.flagged()] == [(0,)]


def test_one_element_has_the_uncertainty_of_its_rounding_not_none() -> None:
    honest = answer(torch.ones(1, 1, 1), [[0]])
    found = gains(honest, torch.ones(1, 1, dtype=torch.bfloat16), 1)
    half_gap = 2.0**-8
    assert found.channel.se[0, 0] == pytest.approx(half_gap / math.sqrt(3))
    assert found.flagged() == ()
    assert gains(honest, torch.full((1, 1), 1 + 2.0**-7, dtype=torch.bfloat16), 1).flagged() == ()  # one gap: 3.5 sigmas
    assert gains(honest, torch.full((1, 1), 1.05, dtype=torch.bfloat16), 1).flagged() != ()


def test_what_the_interval_allows_is_no_gain() -> None:
    given = normal(8, 1, 64).sign() * 1.0
    allowed = answer(given, TOP1, radius=0.01, output=Format.FP32)
    assert gains(allowed, (given.sum(1) * 1.01).float(), 4).token.flagged() == ()
    assert gains(allowed, (given.sum(1) * 1.011).float(), 4).token.flagged() != ()


def test_in_a_wide_interval_a_gain_without_scatter_is_seen() -> None:
    given = ramp(8, 1)
    wide = answer(given, TOP1, radius=0.05)
    assert gains(wide, stored(given, Format.BF16), 4).flagged() == ()
    found = gains(wide, stored(gained(given, wide.routing, 1.008, expert=1), Format.BF16), 4)
    assert [gain.index for gain in found.expert.flagged()] == [(1,)]
    assert found.channel.flagged() == ()


def test_scatter_widens_what_is_allowed() -> None:
    given = ramp(8, 1)
    wide = answer(given, TOP1, radius=0.05, output=Format.FP32)
    scattered = given.sum(1) * (1.008 + 0.02 * normal(8, 128, seed=1))
    assert gains(wide, scattered.float(), 4).expert.flagged() == ()
    assert gains(answer(given, TOP1, output=Format.FP32), scattered.float(), 4).expert.flagged() != ()


def test_a_scale_of_a_row_that_is_in_doubt_moves_it_without_scatter() -> None:
    """Seen on an H200: an expert with one token, whose largest activation rounded the other way in fp16 before it was quantized."""
    given = ramp(8, 1)
    wide = answer(given, TOP1, radius=0.05)
    actual = stored(gained(given, wide.routing, 1.008, expert=1), Format.BF16)
    doubted = replace(wide, row_scale_doubt=torch.tensor([[0.0], [0.01], [0.0], [0.0]] * 2, dtype=torch.float64))
    assert [gain.index for gain in gains(wide, actual, 4).expert.flagged()] == [(1,)]
    assert gains(doubted, actual, 4).expert.flagged() == ()
    assert [
        gain.index for gain in gains(doubted, stored(gained(given, wide.routing, 1.008, expert=2), Format.BF16), 4).expert.flagged()
    ] == [(2,)]


def test_the_doubt_in_a_scale_is_granted_to_the_row_that_has_it_and_no_more() -> None:
    """Experts whose contributions do not overlap: each has its own doubt added. Where they overlap, signs do not cancel."""
    apart = torch.zeros(2, 2, 128, dtype=torch.float64)
    apart[:, 0, :64], apart[:, 1, 64:] = normal(2, 64, seed=1), normal(2, 64, seed=2)
    doubt = torch.tensor([[0.001, 0.002], [0.003, 0.004]], dtype=torch.float64)
    assert _added_bias(apart, [[0, 1], [2, 3]], doubt).tolist() == pytest.approx(doubt.flatten().tolist(), rel=1e-6)
    everywhere = torch.full((8, 2), 0.001, dtype=torch.float64)
    assert bool((_added_bias(ramp(8, 2), TOP2, everywhere) > 1.05 * 0.001).all())


def _added_bias(given: torch.Tensor, ids: list[list[int]], doubt: torch.Tensor) -> torch.Tensor:
    """[E]: what ``doubt`` [M, k] adds to the bias of each expert."""
    wide = answer(given, ids, radius=0.5, output=Format.FP32)
    doubted = replace(wide, row_scale_doubt=doubt)
    without, within = (
        gains(each, stored(given, Format.FP32), int(wide.routing.topk_ids.max()) + 1).expert.bias for each in (wide, doubted)
    )
    return within - without


def test_a_declared_bias_is_granted() -> None:
    given = ramp(8, 1)
    honest = answer(given, TOP1, output=Format.FP32)
    biased = Answer(
        expected=honest.expected,
        low=honest.low,
        high=honest.high,
        contributions=honest.contributions,
        routing=honest.routing,
        output=honest.output,
        gain_bias=0.001,
    )
    actual = (given.sum(1) * 0.9995).float()
    assert gains(honest, actual, 4).flagged() != ()
    assert gains(biased, actual, 4).flagged() == ()


def test_elements_that_are_not_finite_take_no_part() -> None:
    given = ramp(8, 1)
    actual = stored(given, Format.BF16)
    actual[3, 5], actual[4, :] = math.nan, math.inf
    found = gains(answer(given, TOP1), actual, 4)
    assert found.flagged() == ()
    assert math.isnan(found.token.alpha[4])


def test_contributions_of_one_expert_in_two_slots_add() -> None:
    given = torch.ones(1, 2, 3, dtype=torch.float64)
    assert per_expert(answer(given, [[1, 1]]), 2).tolist() == [[[0.0] * 3], [[2.0] * 3]]


@pytest.mark.parametrize(
    "text",
    [
        "e4m3fn-channel-dyntoken-ct-silu-bf16-e3k1m129h96i160-balanced-norenorm-tight",
        "e2m1-group16-dyngroup16-modelopt-swiglustep-bf16-e3k1m129h96i160-balanced-norenorm",
    ],
)
def test_roundings_that_all_fall_one_way_are_no_gain(text: str) -> None:
    """Results of 8 bits times a router weight just below 1: every channel of a token is rounded back up."""
    case = MoECase.from_id(text)
    honest = expected(case, recipe(case, Entry.LAYER, Backend.HUMMING), make_checkpoint(case), make_batch(case))
    output = honest.expected.to(torch.bfloat16)
    assert gains(honest, output, case.experts).flagged() == ()
    assert gains(honest, (honest.expected * 1.008).to(torch.bfloat16), case.experts).expert.flagged()
