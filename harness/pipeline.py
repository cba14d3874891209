"""case -> load -> run -> compare -> verdict: the one file that sees all the stages."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cases.batch import make_batch
from cases.case import Entry, MoECase
from cases.checkpoint import make_checkpoint
from harness import judge
from harness.backends import Backend, experts_expected
from harness.compare import Comparison, compare
from harness.expected import expected
from harness.recipes import recipe
from harness.refusals_architecture import declared
from harness.repeatable import why_not
from harness.subject import LoadFailed, RunFailed, Subject, SubjectError
from harness.verdict import Outcome, Verdict

if TYPE_CHECKING:
    import torch

    from references.moe import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """verdict; timings: seconds per stage; extras: what really ran (classes, dtypes, recipe), for the record."""

    verdict: Verdict
    timings: dict[str, float]
    extras: dict[str, object]


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


def run_pair(case: MoECase, entry: Entry, backend: Backend, subject: Subject) -> PairResult:
    """Drive one pair through every stage. What vLLM raises becomes an outcome; what we get wrong propagates."""
    clock = _Clock()
    how = recipe(case, entry, backend)
    extras: dict[str, object] = {"recipe": how.name}
    with clock.stage("make"):
        checkpoint, batch = make_checkpoint(case), make_batch(case)
    refusals = declared(case, entry, backend)

    def finish(verdict: Verdict) -> PairResult:
        return PairResult(verdict=verdict, timings=clock.seconds, extras=extras)

    def failed(error: SubjectError, outcome: Outcome) -> PairResult:
        if refusal := next((each for each in refusals if each.matches(error.detail)), None):
            return finish(judge.refused(refusal, error.detail))
        return finish(judge.raised(outcome, error.detail))

    try:
        with clock.stage("load"):
            loaded = subject.load(case, entry, checkpoint)
        extras |= {"quant_method": loaded.quant_method}
        with clock.stage("run"):  # the first use of a kernel compiles it
            ran = subject.run(loaded, batch)
        with clock.stage("again"):
            again = subject.run(loaded, batch)
    except LoadFailed as error:
        return failed(error, Outcome.LOAD_ERROR)
    except RunFailed as error:
        return failed(error, Outcome.RUN_ERROR)
    extras |= {"experts_class": ran.experts_class, "gemm_dtypes": list(ran.gemm_dtypes)}
    if refusals:
        return finish(judge.not_refused(refusals[0].reason))
    if ran.experts_class not in (wanted := experts_expected(case, entry, backend)):
        return finish(judge.wrong_class(ran.experts_class, wanted))
    with clock.stage("expect"):
        answer = expected(case, how, checkpoint, batch)
    with clock.stage("compare"):
        output, comparison = _compared(answer, ran.output, again.output, repeats=why_not(case, entry, backend) is None)
        verdict = judge.judge(case, how, checkpoint, batch, answer, output, comparison)
    return finish(verdict)


def _compared(answer: Answer, first: torch.Tensor, second: torch.Tensor, *, repeats: bool) -> tuple[torch.Tensor, Comparison]:
    """The first run and how it stands; where runs may differ each must be allowed, and the one that is farther off is told."""
    if repeats:
        return first, compare(answer, first, repeat=second)
    each = [(output, compare(answer, output)) for output in (first, second)]
    return max(each, key=lambda run: math.inf if run[1].margin is None else run[1].margin)
