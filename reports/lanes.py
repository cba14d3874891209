"""Lanes beside each other: a Markdown table of outcomes, margins and times, and what the ledger confirmed, from runs' records.

``python -m reports.lanes DIRECTORY...``: one run a row, in the order given, of run directories or ones that hold them. Runs of one lane are
told apart by their directories. A run that was ended early is shown as far as it got.

Exit codes: 0, printed, whatever is new; 2, misuse: an argument, or no records that can be read.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from harness.verdict import Outcome
from reports.records import KINDS, Record, RecordsUnreadable, Status, cut_off, read_run, runs_below

HEAD = (
    "lane",
    "pairs",
    "other checks",
    "PASS",
    "refused as declared",
    "known upstream",
    "unavailable",
    "new",
    "cut off",
    "margins: quartiles",
    "pair: median",
    "load",
    "first runs over second: compilation",
    "second runs",
    "reference",
    "other checks, compilation in them",
    "workers",
    "GPUs",
)
_REFERENCE = ("make", "expect", "compare")


class Misuse(Exception):
    """Caused by the user: a sentence that says what to do."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raises Misuse."""
        raise Misuse(f"{message}; see `{self.prog} --help`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run. suffix: what tells its lanes from those of other runs, by backend; "" where nothing has to."""

    directory: Path
    records: list[Record]
    suffix: dict[str, str]

    def lane(self, record: Record) -> str:
        """``marlin``, or ``marlin (20261130-120000-marlin-nightly-77)``; of a fake, that it is one."""
        return f"{record.backend}{self.suffix[record.backend]}" + (f" ({record.fake})" if record.fake else "")


def runs(directories: Iterable[Path]) -> list[Run]:
    """Those that were named, or lie below what was named, each once. Raises OSError, RecordsUnreadable, or Misuse for no records."""
    found: dict[Path, Path] = {}
    for named in directories:
        below = runs_below(named)
        if not below and named.is_dir():
            raise Misuse(f"{named} holds no records; name the directory of a run")
        found |= {path.resolve(): path for path in below or [named] if path.resolve() not in found}
    told = {path: read_run(path) for path in found.values()}
    if not any(told.values()):
        raise Misuse(f"{', '.join(map(str, told))} holds no records; name the directory of a run that compared something")
    of: dict[str, list[Path]] = {}
    for path, records in told.items():
        for backend in {record.backend for record in records}:
            of.setdefault(backend, []).append(path)
    return [
        Run(directory=path, records=records, suffix={lane: _suffix(path, there) for lane, there in of.items() if path in there})
        for path, records in told.items()
    ]


def _suffix(path: Path, among: Sequence[Path]) -> str:
    """Empty for the only one; else its directory's name, with those above where another has that name too."""
    others = [other for other in among if other != path]
    same = any(other.name == path.name for other in others)
    return f" ({path if same else path.name})" if others else ""


def row(run: Run) -> tuple[str, ...]:
    """One run as cells of HEAD; seconds are sums over workers, the median is of one pair, all stages, the first use of a kernel in it."""
    records, lanes = run.records, {run.lane(record) for record in run.records}
    pairs = [record for record in records if record.kind == KINDS[0]]
    others = [record for record in records if record.kind != KINDS[0]]
    outcomes = Counter(record.verdict.outcome for record in records)
    margins = [r.verdict.margin for r in pairs if r.verdict.outcome is Outcome.PASS and r.verdict.margin is not None]
    again = sum(record.seconds.get("again", 0.0) for record in pairs)
    compiled = sum(max(0.0, r.seconds["run"] - r.seconds["again"]) for r in pairs if {"run", "again"} <= r.seconds.keys())
    workers = {(record.worker, record.environment.get("CUDA_VISIBLE_DEVICES", "")) for record in records}
    return (
        lanes.pop() if len(lanes) == 1 else run.directory.name,
        str(len(pairs)),
        str(len(others)),
        str(outcomes[Outcome.PASS]),
        str(outcomes[Outcome.UNSUPPORTED]),
        str(sum(record.status is Status.KNOWN for record in records)),
        str(outcomes[Outcome.UNAVAILABLE]),
        str(sum(record.status is Status.NEW and not cut_off(record) for record in records)),
        str(sum(cut_off(record) for record in records)),
        " ".join(f"{value:.2f}" for value in statistics.quantiles(margins, method="inclusive")) if len(margins) > 1 else "",
        f"{statistics.median(sum(record.seconds.values()) for record in pairs):.2f} s" if pairs else "",
        f"{_total(pairs, 'load'):.0f} s",
        f"{compiled:.0f} s",
        f"{again:.0f} s",
        f"{_total(pairs, *_REFERENCE):.0f} s",
        f"{sum(sum(record.seconds.values()) for record in others):.0f} s",
        str(len({worker for worker, _ in workers})),
        str(len({gpu for _, gpu in workers if gpu})),
    )


def _total(records: Sequence[Record], *stages: str) -> float:
    return sum((record.seconds.get(stage, 0.0) for record in records for stage in stages), 0.0)


def news(told: Iterable[Run]) -> list[str]:
    """What no ledger entry expects, a line each; what was cut off, with the stage it was at."""
    return [
        f"- {run.lane(record)}: `{record.pair}`: {record.verdict.outcome} {record.verdict.signature}"
        for run in told
        for record in run.records
        if record.status is Status.NEW
    ]


def faults(told: Iterable[Run]) -> list[str]:
    """Ledger entries that the runs confirmed: a line each, with lanes and how many records."""
    found: dict[str, Counter[str]] = {}
    first: dict[str, Record] = {}
    for lane, record in ((run.lane(record), record) for run in told for record in run.records):
        if record.status is Status.KNOWN:
            found.setdefault(record.ledger, Counter())[lane] += 1
            first.setdefault(record.ledger, record)
    lines = []
    for entry, lanes in sorted(found.items()):
        seen = ", ".join(f"{lane} {count}" for lane, count in sorted(lanes.items()))
        lines.append(f"| `{entry}` | {seen} | {first[entry].verdict.outcome} | `{first[entry].pair}` |")
    return lines


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def main(arguments: Sequence[str]) -> int:
    """One of the exit codes above; tables and what is new on standard output."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    described = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="python -m reports.lanes", description=__doc__, formatter_class=described)
    parser.add_argument("directories", metavar="DIRECTORY", type=Path, nargs="+", help="of a run, or one that holds runs")
    try:
        told = runs(parser.parse_args(arguments).directories)
    except (Misuse, RecordsUnreadable) as error:
        sys.stderr.write(f"lanes: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"lanes: {error.filename} cannot be read ({error.strerror}); name the directory of a run\n")
        return 2
    lines = [*table(HEAD, map(row, told)), ""]
    lines += [*table(("ledger entry", "records", "outcome", "one case"), ()), *faults(told)]
    if new := news(told):
        lines += ["", "New:", "", *new]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
