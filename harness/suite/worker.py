"""One worker process: one subject, one pair after another, one record each."""

from __future__ import annotations

import resource
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from cases.case import Entry
from harness import ledger
from harness.environment import environment, version
from harness.ledger import Ledger
from harness.pairs import repeat
from harness.subject import TakesViews
from harness.suite import subjects
from reports.records import Record, Recorder, Start, Status, broke

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from cases.batch import Batch
    from cases.case import MoECase
    from cases.checkpoint import Checkpoint
    from harness.ledger import Judged
    from harness.pairs import Pair
    from harness.subject import Loaded, Ran, Subject
    from harness.subject.views import View
    from harness.suite.options import Options
    from harness.verdict import Verdict


class Staged:
    """A subject that tells the recorder which stage a pair is at, so that a killed worker has said where it was."""

    def __init__(self, subject: Subject, recorder: Recorder) -> None:
        """Wraps ``subject``; changes nothing it takes or returns."""
        self._subject, self._recorder = subject, recorder
        self.name = subject.name

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
        return ran


class Worker:
    """Runs pairs and says what is new about each."""

    def __init__(self, options: Options, directory: Path, name: str) -> None:
        """``directory`` is this run's; ``name`` the worker's id."""
        self._options, self._name = options, name
        self._ledger = ledger.load(ledger.LEDGER) if options.subject == subjects.VLLM else Ledger(issues=())
        self._recorder = Recorder(directory, name)

    def open(self) -> None:
        """Open the subject: this is where vLLM is imported. Raises SubjectUnavailable or Misuse."""
        began = time.perf_counter()
        subject = subjects.open_subject(self._options.subject, self._options.backend)
        self._recorder.opened(subject.name, time.perf_counter() - began)
        self._subject = Staged(subject, self._recorder)
        self._environment = {**environment(), "subject": subject.name}

    def run(self, pair: Pair) -> Record:
        """The pair's record, written before it is returned."""
        from harness.pipeline import run_pair

        options = self._options
        start = Start(
            case=pair.case.id,
            entry=pair.entry.value,
            backend=options.backend.value,
            fields=asdict(pair.case),
            environment=self._environment,
            worker=self._name,
        )
        self._recorder.started(start)
        try:
            result = run_pair(pair.case, pair.entry, options.backend, self._subject)
        except Exception as error:  # ours: recorded, then shown with its traceback
            self._recorder.finished(broke(start, self._recorder.last_stage, f"{type(error).__name__}: {error}"))
            raise
        judged = self._ledger.judge(result.verdict, pair.case.id, pair.entry, options.backend, version("vllm") or "")
        record = Record.of(
            start,
            verdict=result.verdict,
            status=Status(judged.standing) if judged.as_expected else Status.NEW,
            news="" if judged.as_expected else news(pair, options, result.verdict, judged, self._environment),
            ledger=judged.issue.id if judged.issue else "",
            link=judged.issue.link if judged.issue else "",
            ran=result.extras,
            seconds=result.timings,
            peak_rss_bytes=peak_rss_bytes(),
        )
        self._recorder.finished(record)
        return record

    def close(self) -> None:
        """After the last pair."""
        self._recorder.close()


def news(pair: Pair, options: Options, verdict: Verdict, judged: Judged, environment: dict[str, str]) -> str:
    """What is new in a sentence, then everything a reader needs who has never seen the harness."""
    from harness.message import message

    again = repeat(pair, options.backend, options.subject)
    return f"{judged.sentence}\n{message(verdict, pair=pair.id, backend=options.backend, environment=environment, again=again)}"


def peak_rss_bytes() -> int:
    """Most memory this process has held so far; Linux counts it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
