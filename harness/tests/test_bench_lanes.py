from __future__ import annotations

import pytest

from harness.backends import Backend, declared_refusal
from harness.commands.bench import BENCHES
from harness.commands.bench_lanes import LARGEST, SAMPLE, rate, sample, together
from harness.exits import Misuse


@pytest.mark.parametrize("backend", [Backend.TRITON, Backend.MARLIN, Backend.CUTLASS])
def test_a_sample_is_spread_over_what_the_lane_runs(backend: Backend) -> None:
    pairs = sample(backend)
    assert 10 <= len(pairs) <= SAMPLE
    assert len(set(pairs)) == len(pairs)
    assert all(declared_refusal(*pair, backend) is None and max(pair.case.hidden, pair.case.intermediate) <= LARGEST for pair in pairs)
    assert len({pair.case.weight for pair in pairs}) > 1


def test_the_rate_of_workers_at_the_same_time_is_the_sum_of_theirs() -> None:
    assert rate([{"timed": [{}] * 40, "seconds": 2.0}, {"timed": [{}] * 40, "seconds": 4.0}]) == 30.0


def test_a_worker_that_fails_ends_the_others_and_says_why() -> None:
    with pytest.raises(Misuse, match=r"a worker of cutlass ended with exit code 1: "):
        together(Backend.CUTLASS, 2, ("none",))


def test_it_is_a_command() -> None:
    assert "lanes" in BENCHES
