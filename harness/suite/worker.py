"""One worker process: one subject, one pair after another, one record each."""

from __future__ import annotations

import resource
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from cases.bad_checkpoints import Bad
from cases.case import Entry
from harness import device_loss, ledger
from harness.architectures import ARCHITECTURES
from harness.device_checks import DeviceCheck
from harness.environment import PACKAGES, WITHOUT_VLLM, environment, version
from harness.ledger import Judged, Ledger, Standing
from harness.load_ledger import LOAD, judge_loading, judge_question
from harness.loading import Question
from harness.pairs import repeat
from harness.relations import Relation
from harness.subject import HasModes, OnDevice, SubjectUnavailable, TakesViews
from harness.subject.loading import Loads
from harness.suite import outputs, subjects
from harness.verdict import LOST, Outcome, Verdict
from reports.records import Record, Recorder, RecordsUnwritable, Start, Status, broke

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

    from cases.batch import Batch
    from cases.case import MoECase
    from cases.checkpoint import Checkpoint
    from harness.backends import Backend
    from harness.pairs import Pair
    from harness.pipeline import PairResult
    from harness.subject import Loaded, Ran, Subject
    from harness.subject.views import View
    from harness.suite.options import Options

_KINDS = {Relation: "exact relation", Question: "loading check", Bad: "loading check", DeviceCheck: "device check"}


class Staged:
    """A subject that tells the recorder which stage a pair is at, so that a killed worker has said where it was."""

    def __init__(self, subject: Subject, recorder: Recorder) -> None:
        """Wraps ``subject``; changes nothing it takes or returns."""
        self._subject, self._recorder = subject, recorder
        self.name = subject.name
        self.output: torch.Tensor | None = None  # of the pair's first run

    def another_pair(self) -> None:
        """The output kept so far is not its."""
        self.output = None

    def load(self, case: MoECase, entry: Entry, checkpoint: Checkpoint) -> Loaded:
        """As the subject's."""
        self._recorder.stage("load")
        loaded = self._subject.load(case, entry, checkpoint)
        self._recorder.stage("loaded")
        return loaded

    def load_viewed(self, case: MoECase, checkpoint: Checkpoint, views: Mapping[str, View]) -> Loaded:
        """As the subject's; a subject without views loads what the views show."""
        self._recorder.stage("load")
        if isinstance(self._subject, TakesViews):
            return self._subject.load_viewed(case, checkpoint, views)
        return self._subject.load(case, Entry.FUSED_EXPERTS, checkpoint)

    def run(self, loaded: Loaded, batch: Batch) -> Ran:
        """As the subject's."""
        self._recorder.stage("run")
        ran = self._subject.run(loaded, batch)
        self._recorder.stage("compare")
        self.output = getattr(ran, "output", None) if self.output is None else self.output
        return ran


class Worker:
    """Runs pairs and says what is new about each."""

    def __init__(self, options: Options, directory: Path, name: str, lost: Callable[[str], None]) -> None:
        """``directory`` is this run's; ``name`` the worker's id; ``lost`` is told, after its record, at which pair the device was lost."""
        self._options, self._name, self._lost = options, name, lost
        self._ledger = ledger.load(ledger.LEDGER) if options.subject == subjects.VLLM else Ledger(issues=())
        self._directory, self._recorder = directory, Recorder(directory, name)

    def open(self) -> None:
        """Open the subject: this is where vLLM is imported. Raises SubjectUnavailable or Misuse."""
        from harness.exact import Drive

        began = time.perf_counter()
        subject = subjects.open_subject(self._options.subject, self._options.backend, on_cpu=bool(self._options.architecture))
        self._recorder.opened(subject.name, time.perf_counter() - began)
        self._device = subject if isinstance(subject, OnDevice) else None
        self._modes = subject if isinstance(subject, HasModes) else None
        self._subject, self._loader = Staged(subject, self._recorder), subject
        self._drive = Drive(self._subject)
        answers_as = {"architecture": self._options.architecture} if self._options.architecture else {}
        packages = PACKAGES if self._options.subject == subjects.VLLM else WITHOUT_VLLM
        self._environment = {**environment(packages), "subject": subject.name, **answers_as}

    def run(self, pair: Pair, relation: Relation | Question | Bad | DeviceCheck | None = None) -> Record:
        """The record of the pair, or of one relation, question about loading or device check asked of it, written before it is returned."""
        options = self._options
        start = Start(
            case=pair.case.id,
            entry=pair.entry.value,
            backend=options.backend.value,
            fields=asdict(pair.case),
            environment=self._environment,
            worker=self._name,
            relation=(LOAD if options.loads_only else "") if relation is None else relation.value,
            kind="pair" if relation is None else _KINDS[type(relation)],
        )
        outputs.forget(self._directory, start.pair)
        self._recorder.started(start)
        self._subject.another_pair()
        timings: dict[str, float] = {}
        extras: dict[str, object] = {}
        try:
            result = self._result(pair, relation)
            verdict, timings, extras = result.verdict, result.timings, result.extras
            if device_loss.may_concern_device(verdict):
                verdict = self._device_verdict(verdict.detail) or verdict
        except RecordsUnwritable:
            raise
        except SubjectUnavailable as error:  # this vLLM cannot be told what the case asks for
            verdict = Verdict(outcome=Outcome.UNAVAILABLE, claim=str(error), detail=str(error))
        except Exception as error:  # the device's, where its answer came late; else ours: recorded, then shown with its traceback
            text = f"{type(error).__name__}: {error}"
            told = self._device_verdict(text)
            if told is None:
                self._recorder.finished(broke(start, self._recorder.last_stage, text))
                raise
            verdict = told
        judged = judged_by(
            self._ledger,
            verdict,
            start,
            here=version("vllm") or "",
            pair=pair,
            backend=options.backend,
            loads_only=options.loads_only,
        )
        record = Record.of(
            start,
            verdict=verdict,
            status=Status(judged.standing) if judged.as_expected else Status.NEW,
            news="" if judged.as_expected else news(start, pair, options, verdict, judged),
            ledger=judged.issue.id if judged.issue else "",
            link=judged.issue.link if judged.issue else "",
            ran=extras,
            seconds=timings,
            peak_rss_bytes=peak_rss_bytes(),
        )
        self._recorder.finished(record)
        if outputs.wanted(record) and self._subject.output is not None:
            outputs.keep(self._directory, record, self._subject.output)
        if verdict.signature.startswith(LOST):
            self._lost(record.pair)
        return record

    def _device_verdict(self, detail: str) -> Verdict | None:
        """What the device answers after something was raised; None when it was not the device."""
        if self._device is None:
            return None
        if device_loss.out_of_memory(detail):
            self._drive.forget()
        return device_loss.verdict(detail, self._recorder.last_stage, self._device.recover())

    def _result(self, pair: Pair, relation: Relation | Question | Bad | DeviceCheck | None) -> PairResult:
        if isinstance(relation, Question | Bad):
            from harness.load_run import ask

            assert isinstance(self._loader, Loads)
            self._recorder.stage("load")
            return ask(relation, pair, self._options.backend, self._loader)
        if self._options.loads_only:
            from harness.load_only import load_pair

            return load_pair(pair.case, self._options.backend, ARCHITECTURES[self._options.architecture], self._subject)
        if relation is None:
            from harness.pipeline import run_pair

            return run_pair(pair.case, pair.entry, self._options.backend, self._subject)
        if isinstance(relation, DeviceCheck):
            from harness.device_asked import run_check

            if self._modes is None:
                raise TypeError(f"{self._subject.name} has no device to be checked")
            self._recorder.stage(relation.value)
            return run_check(relation, pair, self._options.backend, self._modes)
        from harness.exact import run_relation

        return run_relation(relation, pair, self._options.backend, self._drive)

    def close(self) -> None:
        """After the last pair."""
        self._recorder.close()


def judged_by(
    known: Ledger, verdict: Verdict, start: Start, *, here: str, pair: Pair, backend: Backend, loads_only: bool = False
) -> Judged:
    """How a verdict on what was started stands with the vLLM ``here``.

    An entry about ``relation:case`` or ``question:case`` is strict; one about the case is strict for the pair itself and its REFERENCE
    relation.

    What an entry says of a case may break its other relations too, and need not; of loading it says nothing.
    """
    case, entry, relation = pair.case.id, pair.entry, start.relation
    if start.kind == _KINDS[Question]:
        return judge_question(known, verdict, relation, pair.case, backend)
    if loads_only:
        return judge_loading(known, verdict, pair.case, backend)
    if relation in ("", Relation.REFERENCE):
        return known.judge(verdict, case, entry, backend, here)
    if verdict.outcome is Outcome.UNAVAILABLE:  # a device check for which this GPU is too small
        return Judged(standing=Standing.CLEAN)
    judged = known.judge(verdict, f"{relation}:{case}", entry, backend, here)
    if judged.issue is not None:
        return judged
    broad = known.judge(verdict, case, entry, backend, here)
    return Judged(standing=Standing.CLEAN) if broad.standing is Standing.STOPPED_FAILING else broad


def news(start: Start, pair: Pair, options: Options, verdict: Verdict, judged: Judged) -> str:
    """What is new in a sentence, then everything a reader needs who has never seen the harness."""
    from harness.message import message

    again = repeat(pair, options.backend, options.subject)
    if options.architecture:
        again += f" --architecture {options.architecture}"
    if start.relation and not options.loads_only:
        again += f' -k "{start.relation}"'
    text = message(verdict, pair=start.pair, backend=options.backend, environment=start.environment, again=again)
    return f"{judged.sentence}\n{text}"


def peak_rss_bytes() -> int:
    """Most memory this process has held so far; Linux counts it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
