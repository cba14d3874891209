"""Records: one JSON line per (case, entry, backend), written and flushed as it happens.

A run's directory holds one ``worker-<id>.jsonl`` per worker and, once merged, ``records.jsonl``. A worker file tells a
story line by line: ``opened`` (the subject), ``started``, ``stage`` (each as it is entered), ``finished`` (the record).
A worker killed between ``started`` and ``finished`` leaves a pair without a record; ``merge`` makes one that says where it died.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from harness.verdict import LOST, OUT_OF_MEMORY, FaultFit, Outcome, Verdict

MERGED = "records.jsonl"
KINDS = ("pair", "exact relation", "loading check", "device check")  # of records: a pair itself, or what else is asked of one
FIRST_STAGE = "prepare"  # checkpoint, batch and expectation are made
_CUT_OFF = "WORKER_ENDED@"  # the stage follows
_FINISHED = b'{"finished": '


class RecordsUnreadable(ValueError):
    """A line that is not a record, other than the last one of a worker that died; names file and line."""


class RecordsUnwritable(Exception):
    """A full disk, a directory that was taken away: one sentence that says what to do."""

    def __init__(self, path: Path, error: OSError) -> None:
        """``path``: the file; ``error``: what the system said."""
        super().__init__(
            f"{path} cannot be written ({error.strerror}); what was written before is kept: make room, or name another place by --records"
        )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises RecordsUnwritable for what the system says while ``path`` is written."""
    try:
        yield
    except OSError as error:
        raise RecordsUnwritable(path, error) from None


class Status(StrEnum):
    """What the ledger says about an outcome."""

    CLEAN = "clean"  # passed, and no ledger entry expects otherwise
    KNOWN = "known"  # failed exactly as a ledger entry says: an upstream fault, confirmed
    NEW = "new"  # anything else: fails the run


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What is known of a pair before it runs."""

    case: str  # MoECase id
    entry: str
    backend: str
    fields: dict[str, object]  # the case, field by field; "seed" among them
    environment: dict[str, str]
    worker: str
    relation: str = ""  # what is asked of the pair, by name; empty: the pair itself, against the reference
    kind: str = KINDS[0]

    @property
    def pair(self) -> str:
        """``case[entry]`` or ``relation:case[entry]``, the id pytest shows."""
        return f"{self.relation}:{self.case}[{self.entry}]" if self.relation else f"{self.case}[{self.entry}]"

    @property
    def fake(self) -> str:
        """What the subject calls itself where it is a fake of the harness's own; "" of vLLM."""
        subject = self.environment.get("subject", "")
        return subject if subject.startswith("fake") else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Start):
    """What happened to one pair on one backend. Only this is rendered; nothing is looked up again."""

    verdict: Verdict
    status: Status
    news: str = ""  # why it is NEW, for someone who has never seen the harness
    ledger: str = ""  # id of the entry that matched
    link: str = ""  # upstream report of that entry
    ran: dict[str, object] = field(default_factory=dict)  # experts class, GEMM dtypes, recipe: what really ran
    seconds: dict[str, float] = field(default_factory=dict)  # stage -> seconds
    peak_rss_bytes: int = 0  # of the worker process so far

    @classmethod
    def of(cls, start: Start, **rest: Any) -> Record:
        """The record of a pair that was started."""
        return cls(**{f.name: getattr(start, f.name) for f in fields(Start)}, **rest)

    def to_json(self) -> str:
        """One line of ASCII, no newline in it. NaN and infinities are written as Python's json writes them."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Inverse of ``to_json``. Raises ValueError, KeyError or TypeError on anything else."""
        return cls.from_dict(json.loads(line))

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Record:
        """From the parsed line. Raises ValueError, KeyError or TypeError on anything else."""
        data = dict(given)
        unknown = set(data) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"unknown fields {sorted(unknown)}")
        _typed(cls, data)
        verdict = dict(data.pop("verdict"))
        _typed(Verdict, verdict)
        _placed(verdict.get("worst", {}))
        fits = tuple(_fit(dict(each)) for each in verdict.pop("fits"))
        outcome = Outcome(verdict.pop("outcome"))
        return cls(verdict=Verdict(outcome=outcome, fits=fits, **verdict), status=Status(data.pop("status")), **data)


def _fit(given: dict[str, Any]) -> FaultFit:
    _typed(FaultFit, given)
    return FaultFit(**{**given, "experts": tuple(given["experts"])})


_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a string"),
    "int": ((int,), "a number"),
    "float": ((int, float), "a number"),
    "float | None": ((int, float, type(None)), "a number"),
}
_OBJECT = "dict[str, "


def _typed(cls: type, data: dict[str, Any]) -> None:
    """Raises TypeError where a plain field of dataclass ``cls`` has a value of another type; absent ones are not asked."""
    for each in fields(cls):
        if each.name in data:
            _is(f"'{each.name}'", data[each.name], str(each.type))


def _is(what: str, value: object, kind: str) -> None:
    kinds, word = ((dict,), "an object") if kind.startswith(_OBJECT) else _TYPES.get(kind, ((object,), ""))
    if not isinstance(value, kinds):
        raise TypeError(f"{what} is {value!r}, not {word}")
    if isinstance(value, dict) and kind.startswith(_OBJECT):
        for name, each in value.items():
            _is(f"'{name}' in {what}", each, kind.removeprefix(_OBJECT).removesuffix("]"))


def _placed(worst: dict[str, Any]) -> None:
    """Raises TypeError for a worst element without place or value."""
    index = worst.get("index")
    paired = isinstance(index, list) and len(index) == 2 and all(isinstance(each, int) for each in index)
    if worst and not (paired and isinstance(worst.get("actual"), (int, float))):
        raise TypeError(f"'worst' is {worst!r}, not an element with its index and value")


def died(start: Start, stage: str) -> Record:
    """The record of a pair whose worker ended before it could write one."""
    claim = f"worker {start.worker} ended while this pair was at stage '{stage}'"
    return Record.of(
        start,
        verdict=Verdict(outcome=Outcome.RUN_ERROR, claim=claim, signature=f"{_CUT_OFF}{stage}"),
        status=Status.NEW,
        news=f"{claim}; run it alone to see why",
    )


def cut_off(record: Record) -> bool:
    """Whether it is of a pair whose worker ended before it could write one."""
    return record.verdict.signature.startswith(_CUT_OFF)


def broke(start: Start, stage: str, detail: str) -> Record:
    """The record of a pair at which the harness itself raised: no verdict on the subject."""
    claim = f"the harness itself raised at stage '{stage}'"
    return Record.of(
        start,
        verdict=Verdict(outcome=Outcome.RUN_ERROR, claim=claim, detail=detail, signature=f"HARNESS_RAISED@{stage}"),
        status=Status.NEW,
        news=f"{claim}: {detail}",
    )


class Recorder:
    """Writes one worker's file, unbuffered: every line is with the system before the next step begins."""

    def __init__(self, directory: Path, worker: str) -> None:
        """Creates the directory and appends to the worker's own file. Raises RecordsUnwritable, as everything that writes here does."""
        self._worker, self._path = worker, worker_file(directory, worker)
        self.last_stage = FIRST_STAGE
        with writing(self._path):
            directory.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)

    def opened(self, subject: str, seconds: float) -> None:
        """The subject is ready; ``seconds`` went into importing and preparing it."""
        self._write({"opened": {"subject": subject, "seconds": seconds, "worker": self._worker}})

    def started(self, start: Start) -> None:
        """A pair begins."""
        self.last_stage = FIRST_STAGE
        self._write({"started": asdict(start)})

    def stage(self, name: str) -> None:
        """The pair in progress enters a stage."""
        self.last_stage = name
        self._write({"stage": name})

    def finished(self, record: Record) -> None:
        """The pair in progress has its record."""
        self._line(f'{{"finished": {record.to_json()}}}')

    def left(self, record: Record) -> None:
        """A pair that was cut off, as its worker left it: begun, and at a stage."""
        self.started(Start(**{each.name: getattr(record, each.name) for each in fields(Start)}))
        self.stage(record.verdict.signature.removeprefix(_CUT_OFF))

    def close(self) -> None:
        """Nothing more to come."""
        self._file.close()

    def _write(self, event: dict[str, object]) -> None:
        self._line(json.dumps(event))

    def _line(self, text: str) -> None:
        rest = memoryview(f"{text}\n".encode())
        with writing(self._path):
            while rest:
                rest = rest[self._file.write(rest) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStory:
    """A worker's file, read back."""

    records: list[Record]
    died_at: Record | None  # the pair in progress when the file ends, as a record
    open_seconds: float | None  # importing and preparing the subject


def read_worker(path: Path) -> WorkerStory:
    """A last line without its newline is what a killed worker leaves, and is passed over.

    Raises:
        RecordsUnreadable: any other line that cannot be read.
    """
    records: list[Record] = []
    start: Start | None = None
    stage, open_seconds = FIRST_STAGE, None
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                break
            try:
                match json.loads(line):
                    case {"opened": {"seconds": float(seconds)}}:
                        open_seconds = seconds
                    case {"started": dict(given)}:
                        _typed(Start, given)
                        start, stage = Start(**given), FIRST_STAGE
                    case {"stage": str(name)}:
                        stage = name
                    case {"finished": dict(given)}:
                        records.append(Record.from_dict(given))
                        start = None
                    case _:
                        raise ValueError("not an event")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise RecordsUnreadable(f"{path}:{number}: not a record ({error})") from error
    return WorkerStory(records=records, died_at=died(start, stage) if start else None, open_seconds=open_seconds)


def read_run(directory: Path) -> list[Record]:
    """Every record of a run, from where ``source`` says.

    Raises:
        FileNotFoundError: no file of records is there.
        RecordsUnreadable: with file and line.
    """
    path = source(directory)
    return gathered(directory) if path == directory else read(path)


def source(directory: Path) -> Path:
    """The merged file of a run; the directory itself, for its workers' files, where the run ended before it merged what they hold."""
    merged, files = directory / MERGED, worker_files(directory)
    return directory if files and not (merged.exists() and _holds(merged, files)) else merged


def _holds(merged: Path, files: Sequence[Path]) -> bool:
    """Whether the merged file holds all that workers finished, but for what was asked again. Lines are compared, and few are parsed."""
    lines = set(merged.read_bytes().split(b"\n"))
    finished = (line for file in files for line in file.read_bytes().split(b"\n")[:-1] if line.startswith(_FINISHED))
    more = [text for line in finished if (text := line.removeprefix(_FINISHED)[:-1]) not in lines]
    if not more:
        return True
    try:
        records = [Record.from_json(text.decode()) for text in more]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False  # ``gathered`` says which line
    if not all(to_ask_again(record) for record in records):
        return False
    return {(record.backend, record.pair) for record in records} <= {(record.backend, record.pair) for record in read(merged)}


def runs_below(directory: Path) -> list[Path]:
    """``directory`` itself where it is a run's, else the runs somewhere below it, by name: a name begins with the time of its run."""
    if (directory / MERGED).exists() or worker_files(directory):
        return [directory]
    return sorted(
        {path.parent for pattern in (MERGED, "worker-*.jsonl") for path in directory.rglob(pattern)}, key=lambda path: (path.name, path)
    )


def worker_file(directory: Path, worker: str) -> Path:
    """Where a worker writes."""
    return directory / f"worker-{worker}.jsonl"


def worker_files(directory: Path) -> list[Path]:
    """One a worker, restarted workers included."""
    return sorted(directory.glob("worker-*.jsonl"))


def gathered(directory: Path, crashed: Collection[str] | None = None) -> list[Record]:
    """All workers' records, plus one for each pair a worker died in, sorted by pair.

    crashed: of an interrupted run, the workers that had died by themselves: only these leave a pair behind. None: all that left one did.
    """
    stories = [read_worker(path) for path in worker_files(directory)]
    left = [story.died_at for story in stories if story.died_at is not None]
    lost = [record for record in left if crashed is None or record.worker in crashed]
    records = settled([*(record for story in stories for record in story.records), *lost])
    records.sort(key=lambda record: (record.backend, record.case, record.entry, record.relation))
    return records


def to_ask_again(record: Record) -> bool:
    """Whether the device or the machine was why it ended so: a run that is continued asks again."""
    lost = record.verdict.signature.startswith((f"{OUT_OF_MEMORY}@", f"{LOST}@"))
    return lost or record.verdict.outcome is Outcome.UNAVAILABLE


def settled(records: list[Record]) -> list[Record]:
    """Without those of pairs that were asked again: their other record stands."""
    keys = [(record.backend, record.pair) for record in records]
    answered = {key for key, record in zip(keys, records, strict=True) if not to_ask_again(record)}
    last = dict(zip(keys, records, strict=True))
    return [r for key, r in zip(keys, records, strict=True) if not to_ask_again(r) or (key not in answered and r is last[key])]


def merge(directory: Path, crashed: Collection[str] | None = None) -> list[Record]:
    """As ``gathered``; also written to ``records.jsonl``. Raises RecordsUnwritable."""
    records = gathered(directory, crashed)
    write(directory / MERGED, records)
    return records


def write(path: Path, records: Iterable[Record]) -> None:
    """One record a line; all of them, or no file. Raises RecordsUnwritable."""
    part = path.with_suffix(".part")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text("".join(record.to_json() + "\n" for record in records), encoding="utf-8")
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read(path: Path) -> list[Record]:
    """Records of a merged file. Raises RecordsUnreadable with file and line."""
    records: list[Record] = []
    content = path.read_bytes()
    if not content:
        return records
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), 1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise RecordsUnreadable(f"{path}:{number}: not UTF-8 text (byte 0x{line[error.start]:02x})") from error
        try:
            records.append(Record.from_json(text))
        except KeyError as error:
            raise RecordsUnreadable(f"{path}:{number}: not a record ({error} is missing)") from error
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RecordsUnreadable(f"{path}:{number}: not a record ({error})") from error
    return records
