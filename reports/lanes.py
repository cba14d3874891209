"""Lanes beside each other: a Markdown table of outcomes, margins and times, and what the ledger confirmed, from runs' records.

``python -m reports.lanes DIRECTORY...``: one run directory a row, in the order given. A run that was ended early is shown as far as it got.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.verdict import Outcome
from reports.records import KINDS, Record, RecordsUnreadable, Status, read_run

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


def row(directory: Path) -> tuple[str, ...]:
    """One run as cells of HEAD; seconds are sums over workers, the median is of one pair, all stages, the first use of a kernel in it."""
    records = read_run(directory)
    pairs = [record for record in records if record.kind == KINDS[0]]
    others = [record for record in records if record.kind != KINDS[0]]
    outcomes = Counter(record.verdict.outcome for record in records)
    margins = [r.verdict.margin for r in pairs if r.verdict.outcome is Outcome.PASS and r.verdict.margin is not None]
    again = sum(record.seconds.get("again", 0.0) for record in pairs)
    compiled = sum(max(0.0, r.seconds["run"] - r.seconds["again"]) for r in pairs if {"run", "again"} <= r.seconds.keys())
    workers = {(record.worker, record.environment.get("CUDA_VISIBLE_DEVICES", "")) for record in records}
    return (
        records[0].backend if records else directory.name,
        str(len(pairs)),
        str(len(others)),
        str(outcomes[Outcome.PASS]),
        str(outcomes[Outcome.UNSUPPORTED]),
        str(sum(record.status is Status.KNOWN for record in records)),
        str(outcomes[Outcome.UNAVAILABLE]),
        str(sum(_new(record) for record in records)),
        str(sum(_cut_off(record) for record in records)),
        " ".join(f"{value:.2f}" for value in statistics.quantiles(margins)) if len(margins) > 1 else "",
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


def _new(record: Record) -> bool:
    return record.status is Status.NEW and not _cut_off(record)


def news(directories: Iterable[Path]) -> list[str]:
    """What no ledger entry expects, a line each."""
    return [
        f"- {record.backend}: `{record.pair}`: {record.verdict.outcome} {record.verdict.signature}"
        for directory in directories
        for record in read_run(directory)
        if _new(record)
    ]


def _cut_off(record: Record) -> bool:
    return record.verdict.signature.startswith("WORKER_ENDED")


def faults(directories: Iterable[Path]) -> list[str]:
    """Ledger entries that the runs confirmed: a line each, with lanes and how many records."""
    found: dict[str, Counter[str]] = {}
    first: dict[str, Record] = {}
    for record in (record for directory in directories for record in read_run(directory)):
        if record.status is Status.KNOWN:
            found.setdefault(record.ledger, Counter())[record.backend] += 1
            first.setdefault(record.ledger, record)
    lines = []
    for entry, lanes in sorted(found.items()):
        seen = ", ".join(f"{lane} {count}" for lane, count in sorted(lanes.items()))
        lines.append(f"| `{entry}` | {seen} | {first[entry].verdict.outcome} | `{first[entry].case}` ({first[entry].entry}) |")
    return lines


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def main(arguments: Sequence[str]) -> int:
    """Tables and what is new on standard output; 2 when no directory is given, or one holds no records that can be read."""
    if not arguments:
        sys.stderr.write("lanes: name the directories of one or more runs\n")
        return 2
    directories = [Path(argument) for argument in arguments]
    try:
        lines = [*table(HEAD, map(row, directories)), ""]
        lines += [*table(("ledger entry", "records", "outcome", "one case"), ()), *faults(directories)]
        new = news(directories)
    except RecordsUnreadable as error:
        sys.stderr.write(f"lanes: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"lanes: {error.filename} cannot be read ({error.strerror}); name the directory of a run\n")
        return 2
    if new:
        lines += ["", "New:", "", *new]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
