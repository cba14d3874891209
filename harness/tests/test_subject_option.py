"""``--subject``: what a fake of a whole lane does, and which pairs a fault is shown by."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cases.batch import make_batch
from cases.case import Level
from cases.checkpoint import make_checkpoint
from harness.backends import SPECS, Backend, declared_refusal
from harness.environment import child_environ
from harness.faults import Fault, applicable
from harness.pairs import Pair, select
from harness.pipeline import run_pair
from harness.recipes import recipe
from harness.subject.fake import RefusingFake
from harness.suite.options import Options
from harness.verdict import Outcome

SMOKE = select(Level.SMOKE)
LANE = Backend.INTERPRETER
REFUSED = [pair for pair in SMOKE if declared_refusal(*pair, LANE) is not None]


def options(subject: str, *cases: str) -> Options:
    return Options.parse(
        backend=LANE, level=Level.SMOKE, cases=cases, entry=None, subject=subject, records="nowhere", expression="", selected=False
    )


@pytest.mark.parametrize("refused", REFUSED, ids=[pair.id for pair in REFUSED])
def test_the_honest_fake_refuses_what_vllm_refuses(refused: Pair) -> None:
    assert run_pair(*refused, LANE, RefusingFake(None, LANE)).verdict.outcome is Outcome.UNSUPPORTED


def test_every_declared_refusal_of_every_lane_knows_the_fakes_words() -> None:
    assert all(refusal.matches(refusal.says) for spec in SPECS.values() for refusal in spec.refusals)


def test_the_fake_runs_what_is_not_refused() -> None:
    case, entry = next(pair for pair in SMOKE if pair not in REFUSED)
    subject = RefusingFake(None, LANE)
    assert subject.run(subject.load(case, entry, make_checkpoint(case)), make_batch(case)).output.shape == (case.tokens, case.hidden)


@pytest.mark.parametrize("fault", [Fault.W2_SCALE_APPLIED_TWICE, Fault.W_SCALE_FLAT_INDEX, Fault.BIAS_DROPPED, Fault.ZERO_OUTPUT])
def test_pairs_that_cannot_show_the_fault_are_left_out_and_counted(fault: Fault) -> None:
    asked = options(f"fake:{fault.name}")
    shown = {pair for pair in SMOKE if applicable(fault, pair.case, recipe(*pair, LANE))}
    assert set(asked.pairs()) == shown
    assert asked.left_out() == len(SMOKE) - len(shown)
    assert all(applicable(fault, related.pair.case, recipe(*related.pair, LANE)) for related in asked.related())


def test_an_honest_fake_leaves_nothing_out() -> None:
    assert options("fake").pairs() == SMOKE
    assert options("fake").left_out() == 0


def test_a_fault_over_cases_that_do_not_all_show_it_ends_with_1_and_says_what_was_left_out(tmp_path: Path) -> None:
    asked = options("fake:BIAS_DROPPED")
    biased, other = asked.pairs()[0].case, next(pair.case for pair in SMOKE if not pair.case.bias)
    command = [sys.executable, "-m", "harness.cli", "run", biased.id, other.id, "--subject=fake:BIAS_DROPPED", f"--backend={LANE}"]
    environ = {name: value for name, value in child_environ().items() if not name.startswith("PYTEST_")}
    done = subprocess.run([*command, f"--records={tmp_path}", "-n0"], capture_output=True, text=True, check=False, env=environ)
    left = options("fake:BIAS_DROPPED", biased.id, other.id).left_out()
    assert done.returncode == 1
    assert f"Left out: {left} pair" in done.stdout
    assert "HARNESS_RAISED" not in done.stdout
