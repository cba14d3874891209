"""Runs that may differ: declared, and each of them judged."""

from __future__ import annotations

import pytest
import torch

from cases.batch import make_batch
from cases.case import Entry, MoECase
from cases.checkpoint import make_checkpoint
from harness.backends import Backend
from harness.expected import expected
from harness.pipeline import run_pair
from harness.recipes import recipe
from harness.repeatable import why_not
from harness.subject import Loaded, Ran
from harness.verdict import Outcome, Verdict

CASE = MoECase.from_id("bf16-none-none-plain-silu-bf16-e5k3m3h64i32-balanced")
LANE = Backend.BATCHED_TRITON


class Unsteady:
    """Hands out one output after another."""

    def __init__(self, *outputs: torch.Tensor) -> None:
        self.outputs = list(outputs)

    def load(self, case, entry, checkpoint):  # type: ignore[no-untyped-def]
        return Loaded(handle=None, quant_method="none", experts_class="BatchedTritonExperts")

    def run(self, loaded, batch):  # type: ignore[no-untyped-def]
        return Ran(output=self.outputs.pop(0), experts_class="BatchedTritonExperts", gemm_dtypes=())


def _verdict(entry: Entry, far: bool) -> Verdict:
    answer = expected(CASE, recipe(CASE, entry, LANE), make_checkpoint(CASE), make_batch(CASE))
    low, first, high = (each.to(torch.bfloat16) for each in (answer.low, answer.expected, answer.high))
    at = tuple(int(i) for i in (low < high).nonzero()[0])
    second = first.clone()
    second[at] = 2 * high[at] + 1 if far else (low if first[at] != low[at] else high)[at]
    return run_pair(CASE, entry, LANE, Unsteady(first, second)).verdict  # type: ignore[arg-type]


@pytest.mark.parametrize(("far", "outcome"), [(False, Outcome.PASS), (True, Outcome.MISMATCH)])
def test_each_run_must_be_allowed_where_runs_may_differ(far: bool, outcome: Outcome) -> None:
    assert _verdict(Entry.BATCHED, far).outcome is outcome


def test_elsewhere_a_second_run_with_other_bits_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.pipeline.why_not", lambda case, entry, backend: None)
    assert _verdict(Entry.BATCHED, far=False).outcome is Outcome.NONDETERMINISTIC


def test_two_addends_have_one_order_and_the_interpreter_has_no_atomics() -> None:
    assert why_not(CASE, Entry.BATCHED, LANE)
    assert why_not(CASE, Entry.BATCHED, Backend.INTERPRETER) is None
    assert why_not(CASE, Entry.LAYER, Backend.TRITON) is None
    assert why_not(MoECase.from_id("bf16-none-none-plain-silu-bf16-e4k2m8h128i64-balanced"), Entry.BATCHED, LANE) is None
