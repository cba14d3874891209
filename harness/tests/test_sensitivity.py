from __future__ import annotations

import io
from functools import cache

import pytest
from rich.console import Console

from cases.case import Entry, MoECase
from harness.backends import Backend
from harness.faults import Fault, applicable, why_not
from harness.recipes import recipe
from harness.sensitivity import Pair, Shown, missed, render, sample, show, smoke

LANE = Backend.INTERPRETER
MARLIN = {  # only its kernels have an order of their own
    Fault.BIAS_NOT_PERMUTED,
    Fault.BIAS_READ_AS_16_BITS,
    Fault.W13_SCALES_IN_ORDER_OF_CHANNELS,
    Fault.W13_SCALES_IN_ORDER_OF_GROUPS,
}
HUMMING = {Fault.SMALL_SCALES_FLUSHED, Fault.ROUNDED_AT_A_QUARTER}  # of its fp16 kernels
PER_FAULT = 8
SHARDS = 16


@cache
def chosen() -> dict[Pair, tuple[Fault, ...]]:
    return sample(LANE, PER_FAULT)


def wrong(shown: list[Shown]) -> list[str]:
    return [f"{trial.fault or 'honest'} {trial.case}[{trial.entry}]" for each in shown for trial in missed(each.trials)]


@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_sample_of_every_fault_is_caught_and_honesty_is_not(shard: int) -> None:
    shown = [show(pair, LANE, faults) for pair, faults in list(chosen().items())[shard::SHARDS]]
    assert wrong(shown) == []


def test_the_sample_holds_every_fault_that_a_pair_of_the_lane_can_show() -> None:
    assert {fault for faults in chosen().values() for fault in faults} == set(Fault) - MARLIN - HUMMING


def test_every_fault_is_asked_of_some_pair_and_every_exclusion_has_a_reason() -> None:
    recipes = [(case, recipe(case, entry, LANE)) for case, entry in smoke(LANE)]
    for fault in Fault:
        reasons = [why_not(fault, case, how) for case, how in recipes]
        assert (None in reasons) != (fault in MARLIN | HUMMING), fault
        assert all(reason is None or reason.strip() for reason in reasons)


@pytest.mark.parametrize(("lane", "faults"), [(Backend.MARLIN, MARLIN), (Backend.HUMMING, HUMMING)])
def test_faults_of_a_lane_are_asked_of_some_pair_of_it(lane: Backend, faults: set[Fault]) -> None:
    layers = [pair for pair in smoke(lane) if pair[1] is Entry.LAYER]
    nightly = "e2m1-group32-none-quark-gelu_tanh-fp16-e8k2m33h256i128-single", "int4-group128-none-ct-silu-bf16-e3k1m129h128i256-single"
    layers += [(MoECase.from_id(text), Entry.LAYER) for text in nightly]
    recipes = [(case, recipe(case, entry, lane)) for case, entry in layers]
    assert all(any(applicable(fault, case, how) for case, how in recipes) for fault in faults)


def test_a_trial_that_goes_wrong_is_found() -> None:
    pair = next((case, entry) for case, entry in smoke(LANE) if not applicable(Fault.GATE_UP_SWAPPED, case, recipe(case, entry, LANE)))
    shown = show(pair, LANE, (Fault.ZERO_OUTPUT,))
    honest, faulty = shown.trials
    assert (honest.seen, faulty.seen) == (False, True)
    assert list(missed(shown.trials)) == []
    assert faulty.outside
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(shown.trials, [shown.resolution]))
    assert "ZERO_OUTPUT" in console.export_text()


@pytest.mark.full
@pytest.mark.parametrize("shard", range(4 * SHARDS))
def test_every_fault_that_applies_is_caught_in_every_smoke_pair(shard: int) -> None:
    shown = [show(pair, LANE) for pair in smoke(LANE)[shard :: 4 * SHARDS]]
    assert wrong(shown) == []
