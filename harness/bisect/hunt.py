"""Searching a history or a row of releases for the first state that shows a failure: probes by running, judged, remembered."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from harness.bisect.observe import Observation
from harness.bisect.search import Result, Status, first_bad
from harness.bisect.states import StateRun
from harness.bisect.trees import Tree
from harness.bisect.trouble import StateError, StateUnavailable
from harness.pairs import Pair
from harness.verdict import Outcome


class RegressOn(StrEnum):
    """What counts as bad."""

    SIGNATURE = "signature"  # the very failure that the bad end shows, outcome and signature; another failure cannot be judged
    ANY = "any"  # whatever fails
    IMPORT = "import"  # it cannot be imported or its surface is not recognised; whatever can be driven is good
    FIXED = "fixed"  # the reverse: the older end fails, the newer passes; the first one that passes is looked for


def word(status: Status, on: RegressOn) -> str:
    """What a reader is told for a status: a search for a repair calls what it looks for "passes", not "bad"."""
    if on is not RegressOn.FIXED or status is Status.UNKNOWN:
        return status.value
    return "passes" if status is Status.BAD else "fails"


def judge(observation: Observation, on: RegressOn, target: str = "") -> Status:
    """One pair. ``target``: with SIGNATURE, the ``Observation.signature`` looked for."""
    if on is RegressOn.IMPORT and (observation.cannot_import or observation.verdict.outcome is not Outcome.UNAVAILABLE):
        return Status.BAD if observation.cannot_import else Status.GOOD
    if on is RegressOn.SIGNATURE and observation.signature == target:
        return Status.BAD
    if observation.cannot_import or observation.verdict.outcome in (Outcome.UNAVAILABLE, Outcome.UNSUPPORTED):
        return Status.UNKNOWN
    if on is RegressOn.FIXED:
        return Status.BAD if observation.verdict.outcome is Outcome.PASS else Status.GOOD
    if observation.verdict.outcome is Outcome.PASS:
        return Status.GOOD
    return Status.BAD if on is RegressOn.ANY else Status.UNKNOWN


def overall(statuses: Sequence[Status], on: RegressOn) -> Status:
    """Of several pairs: one bad is bad, one unknown among good ones is unknown; for FIXED one that still fails is enough for good."""
    first, second = (Status.GOOD, Status.BAD) if on is RegressOn.FIXED else (Status.BAD, Status.GOOD)
    if first in statuses:
        return first
    return second if statuses and Status.UNKNOWN not in statuses else Status.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one probe said, and in a few words why."""

    status: Status
    why: str
    key: str = ""  # of the tree: equal trees give equal answers


@dataclass(slots=True, kw_only=True)
class Log:
    """A search so far, written after every probe: an interrupted one goes on from here."""

    path: Path | None
    asked: dict[str, str]  # what was searched, as given: another search must not use this log
    answers: dict[str, Answer] = field(default_factory=dict)
    targets: dict[str, str] = field(default_factory=dict)  # pair -> signature at the bad end; the pairs still run
    seen: dict[str, dict[str, Observation]] = field(default_factory=dict)  # revision -> pair -> what a probe observed, of the pairs above

    @classmethod
    def start(cls, path: Path | None, asked: dict[str, str], *, resume: bool) -> Log:
        """Raises StateError when ``resume`` is asked and the log is not there, or is of another search."""
        log = cls(path=path, asked=asked)
        if resume:
            if path is None or not path.is_file():
                raise StateError(f"there is no search to resume at {path}: leave --resume out")
            try:
                log._read(json.loads(path.read_text()))
            except (ValueError, KeyError, TypeError) as error:
                raise StateError(f"{path} is no log of a search that this moediff reads: leave --resume out") from error
        return log

    def _read(self, said: dict[str, Any]) -> None:
        if said["asked"] != self.asked:
            changed = [key for key in self.asked if said["asked"].get(key) != self.asked[key]]
            raise StateError(f"{self.path} is the log of another search ({', '.join(changed)} differ): leave --resume out")
        self.targets = said["targets"]
        self.answers = {name: Answer(**each | {"status": Status(each["status"])}) for name, each in said["answers"].items()}
        self.seen = {name: {pair: Observation.from_dict(each) for pair, each in pairs.items()} for name, pairs in said["seen"].items()}

    def note(self, revision: str, answer: Answer) -> None:
        """Remember and write."""
        self.answers[revision] = answer
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            answers = {name: asdict(each) for name, each in self.answers.items()}
            seen = {name: {pair: each.to_dict() for pair, each in pairs.items()} for name, pairs in self.seen.items()}
            whole = {"asked": self.asked, "targets": self.targets, "answers": answers, "seen": seen}
            part = self.path.with_suffix(f".{os.getpid()}.part")
            part.write_text(json.dumps(whole))
            part.replace(self.path)  # a search that is killed while it writes can still be resumed

    def observed(self, revision: str) -> dict[str, Observation]:
        """What was seen there, or in equal sources, of the pairs searched with; empty where it could not be run."""
        key = self.answers[revision].key if revision in self.answers else ""
        ran = [revision, *(name for name, answer in self.answers.items() if key and answer.key == key)]
        seen = next((self.seen[name] for name in ran if name in self.seen), {})
        return {pair: each for pair, each in seen.items() if pair in self.targets}

    @property
    def statuses(self) -> Mapping[str, Status]:
        """For ``first_bad``."""
        return {name: answer.status for name, answer in self.answers.items()}


class Runner(Protocol):
    """Runs pairs in the state of one revision. Raises StateUnavailable."""

    def __call__(self, revision: str, pairs: Sequence[Pair]) -> StateRun:
        """The run, and with it the key of its tree."""
        ...


@dataclass(slots=True)
class Hunt:
    """One search. ``trees`` keeps what the probes ran, for the report."""

    pairs: tuple[Pair, ...]
    on: RegressOn
    run: Runner
    log: Log
    key_of: Callable[[str], str]  # the key of a revision's tree, without running it; raises StateUnavailable
    tell: Callable[[str, Answer], None] = lambda _revision, _answer: None
    trees: list[Tree] = field(default_factory=list)

    def search(self, revisions: Sequence[str]) -> Result:
        """The first bad one. Of many pairs only those that tell the ends apart are run in between."""
        bad_end, good_end = revisions[-1], revisions[0]

        def probe(revision: str) -> Status:
            answer = self._same_tree(revision) or self._ask(revision, bad_end=revision == bad_end, good_end=revision == good_end)
            self.log.note(revision, answer)
            self.tell(revision, answer)
            return answer.status

        return first_bad(revisions, probe, known=self.log.statuses)

    def _same_tree(self, revision: str) -> Answer | None:
        try:
            key = self.key_of(revision)
        except StateUnavailable as error:
            return Answer(status=Status.UNKNOWN, why=str(error))
        twin = next((name for name, each in self.log.answers.items() if each.key == key and each.key), None)
        if twin is None:
            return None
        known = self.log.answers[twin]
        return Answer(status=known.status, why=f"same sources as {twin[:12]}", key=key)

    def _ask(self, revision: str, *, bad_end: bool, good_end: bool) -> Answer:
        pairs = [pair for pair in self.pairs if not self.log.targets or pair.id in self.log.targets]
        try:
            run = self.run(revision, pairs)
        except StateUnavailable as error:
            return Answer(status=Status.UNKNOWN, why=str(error))
        self.trees.append(run.tree)
        key = run.tree.key
        seen = run.observations
        if bad_end and not self.log.targets:
            self.log.targets = {name: each.signature for name, each in seen.items() if self._shows(each)}
        self.log.seen[revision] = {name: each for name, each in seen.items() if name in self.log.targets}
        status = {name: judge(each, self.on, self.log.targets.get(name, "")) for name, each in seen.items()}
        if good_end:
            telling = [name for name, each in status.items() if each is Status.GOOD and name in self.log.targets]
            if telling:
                self.log.targets = {name: self.log.targets[name] for name in telling}
                status = {name: status[name] for name in telling}
        verdict = overall(list(status.values()), self.on)
        return Answer(status=verdict, why=_why(seen, status, verdict), key=key)

    def _shows(self, observation: Observation) -> bool:
        """Whether the bad end's observation is what is looked for."""
        match self.on:
            case RegressOn.SIGNATURE:
                return observation.verdict.outcome not in (Outcome.PASS, Outcome.UNAVAILABLE)
            case RegressOn.ANY:
                return observation.failed
            case RegressOn.IMPORT:
                return observation.cannot_import
            case RegressOn.FIXED:
                return observation.verdict.outcome is Outcome.PASS


def _why(seen: Mapping[str, Observation], status: Mapping[str, Status], verdict: Status) -> str:
    """The first pair that decided."""
    names = [name for name, each in status.items() if each is verdict]
    if not names:
        return "no pair could be judged"
    first = seen[names[0]]
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    said = (
        first.verdict.detail.splitlines()[0] if first.verdict.outcome is Outcome.UNAVAILABLE and first.verdict.detail else first.signature
    )
    return f"{names[0]}: {said}{more}"
