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
from reports.records import Record, Status, merge, read_worker, worker_files

HEAD = (
    "lane",
    "asked",
    "PASS",
    "refused as declared",
    "known upstream",
    "new",
    "cut off",
    "margins: quartiles",
    "load",
    "run, compilation in it",
    "reference",
    "median",
    "workers",
)


def row(directory: Path) -> tuple[str, ...]:
    """One run as cells of HEAD; seconds are sums over workers, the median is of one pair, all stages."""
    records = merge(directory)
    outcomes = Counter(record.verdict.outcome for record in records)
    margins = [r.verdict.margin for r in records if r.verdict.outcome is Outcome.PASS and not r.relation and r.verdict.margin is not None]
    stages = {
        name: sum(record.seconds.get(name, 0.0) for record in records) for name in ("load", "run", "make", "expect", "compare", "relation")
    }
    return (
        records[0].backend,
        str(len(records)),
        str(outcomes[Outcome.PASS]),
        str(outcomes[Outcome.UNSUPPORTED]),
        str(sum(record.status is Status.KNOWN for record in records)),
        str(sum(record.status is Status.NEW and not _cut_off(record) for record in records)),
        str(sum(_cut_off(record) for record in records)),
        " ".join(f"{value:.2f}" for value in statistics.quantiles(margins)) if len(margins) > 1 else "",
        f"{stages['load']:.0f} s",
        f"{stages['run'] + stages['relation']:.0f} s",
        f"{stages['make'] + stages['expect'] + stages['compare']:.0f} s",
        f"{statistics.median(sum(record.seconds.values()) for record in records):.2f} s",
        str(sum(read_worker(path).open_seconds is not None for path in worker_files(directory))),
    )


def _cut_off(record: Record) -> bool:
    return record.verdict.signature.startswith("WORKER_ENDED")


def faults(directories: Iterable[Path]) -> list[str]:
    """Ledger entries that the runs confirmed: a line each, with lanes and how many records."""
    found: dict[str, Counter[str]] = {}
    first: dict[str, Record] = {}
    for directory in directories:
        for record in merge(directory):
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
    """Both tables on standard output; 2 when no directory is given."""
    directories = [Path(argument) for argument in arguments]
    if not directories:
        sys.stderr.write("lanes: name the directories of one or more runs\n")
        return 2
    lines = [*table(HEAD, map(row, directories)), ""]
    lines += [*table(("ledger entry", "records", "outcome", "one case"), ()), *faults(directories)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
