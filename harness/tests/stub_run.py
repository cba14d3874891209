"""A pytest plugin (``-p harness.tests.stub_run``) that puts a stub where subject and pipeline stand: the run without the truth.

Pairs pass in no time and without torch, except those whose position in the level the environment names:
STUB_FAIL (MISMATCH), STUB_KILL (SIGKILL while "running"), STUB_RAISE (an exception of the pipeline), STUB_LOSE (an illegal memory
access: whatever runs later in that process fails too), STUB_LATE (the same, seen only when the harness reads the output),
STUB_MEMORY (out of memory), STUB_UNDRIVEN (the subject cannot be told what the case asks);
STUB_UNAVAILABLE=1, STUB_TELL=1, STUB_LEDGER=<file>; STUB_SLOW=<seconds a pair takes>; STUB_FULL=<bytes a file may have>.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cases.case import Entry, Level, MoECase
from cases.generate import pairs
from harness import ledger, loading, preflight
from harness.backends import Backend
from harness.subject import SubjectUnavailable
from harness.suite import subjects
from harness.suite.options import Options
from harness.verdict import Outcome, Verdict


@dataclass
class StubResult:
    verdict: Verdict
    timings: dict[str, float] = field(default_factory=lambda: {"load": 0.25, "run": 0.5})
    extras: dict[str, object] = field(default_factory=lambda: {"experts_class": "StubExperts", "recipe": "stub"})


class StubSubject:
    def __init__(self, name: str) -> None:
        self.name = name

    def load(self, *_: object) -> Any:
        return None

    def run(self, *_: object) -> Any:
        if os.environ.get("STUB_NOW_KILL"):
            os.kill(os.getpid(), signal.SIGKILL)

    def recover(self) -> str | None:
        return os.environ.get("STUB_LOST")


def open_stub(spec: str, backend: Backend) -> StubSubject:
    if os.environ.get("STUB_UNAVAILABLE"):
        raise SubjectUnavailable("the stub was told to be unavailable: unset STUB_UNAVAILABLE")
    return StubSubject(spec)


def run_pair(case: MoECase, entry: Entry, backend: Backend, subject: Any) -> StubResult:
    smoke = pairs(Level.SMOKE)
    position = str(smoke.index((case, entry))) if (case, entry) in smoke else "none"  # a case that is named enters by every door
    subject.load(case, entry, None)
    if position == os.environ.get("STUB_KILL"):
        os.environ["STUB_NOW_KILL"] = "1"
    subject.run(None, None)
    time.sleep(float(os.environ.get("STUB_SLOW", "0")))
    illegal = "AcceleratorError: CUDA error: an illegal memory access was encountered"
    if position in (os.environ.get("STUB_LOSE"), os.environ.get("STUB_LATE")):
        os.environ["STUB_LOST"] = illegal
        if position == os.environ.get("STUB_LATE"):
            raise RuntimeError(illegal)
    if os.environ.get("STUB_LOST"):
        return StubResult(Verdict(outcome=Outcome.RUN_ERROR, claim="the loaded layer runs", detail=illegal, signature=illegal))
    if position == os.environ.get("STUB_MEMORY"):
        return StubResult(
            Verdict(outcome=Outcome.LOAD_ERROR, claim="it loads", detail="OutOfMemoryError: CUDA out of memory.", signature="OutOf")
        )
    if position == os.environ.get("STUB_UNDRIVEN"):
        raise SubjectUnavailable("this vllm takes no has_bias; leave out this case")
    if position == os.environ.get("STUB_RAISE"):
        raise RuntimeError("the stub's pipeline broke")
    if position == os.environ.get("STUB_FAIL"):
        return StubResult(Verdict(outcome=Outcome.MISMATCH, claim="the stub was told to fail", margin=3.0, signature="STUB"))
    return StubResult(Verdict(outcome=Outcome.PASS, claim="inside the bound", margin=0.25))


def pytest_unconfigure() -> None:
    if os.environ.get("STUB_TELL") and "PYTEST_XDIST_WORKER" not in os.environ:
        heavy = sorted({"torch", "vllm", "triton"} & set(sys.modules))
        sys.stderr.write(f"controller imported: {', '.join(heavy) or 'nothing heavy'}\n")


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    pipeline = ModuleType("harness.pipeline")
    pipeline.run_pair = run_pair  # type: ignore[attr-defined]
    sys.modules["harness.pipeline"] = pipeline
    exact = ModuleType("harness.exact")  # relations are made of torch: the stub's run has pairs only
    exact.Drive = lambda subject: SimpleNamespace(forget=lambda: None)  # type: ignore[attr-defined]
    sys.modules["harness.exact"] = exact
    Options.related = lambda self: ()  # type: ignore[method-assign]
    loading.chosen = lambda options: ()
    if size := os.environ.get("STUB_FULL"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))
    preflight.has_vllm = lambda: True  # the stub needs none
    subjects.open_subject = lambda spec, backend, *, on_cpu=False: open_stub(spec, backend)
    if file := os.environ.get("STUB_LEDGER"):
        ledger.LEDGER = Path(file)
