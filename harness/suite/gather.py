"""What the controller does with the workers' files: a directory for the run, and afterwards one set of records and a page."""

from __future__ import annotations

import os
from datetime import datetime
from typing import TYPE_CHECKING

from cases.case import Entry, Level
from cases.generate import pairs
from cases.lattice_pairs import lattice_pairs
from harness import device_checks, ledger
from harness.backends import SPECS, has_entry
from harness.environment import version
from harness.loading import questions
from harness.recipes import written
from harness.relations import asked
from harness.suite.subjects import VLLM
from reports.records import Record, merge, read_worker, worker_file

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from harness.backends import Backend
    from harness.suite.options import Options


def directory(options: Options) -> Path:
    """A name of this run's own under ``--records``, or the run that is continued; nothing is created until a worker writes."""
    if options.resume is not None:
        return options.resume
    what = "cases" if options.cases else options.level.value
    return options.records / f"{datetime.now():%Y%m%d-%H%M%S}-{options.backend}-{what}-{os.getpid()}"


def stale(options: Options) -> list[str]:
    """Ledger entries that match no pair of the level they name, each as a sentence; of this backend and vLLM, up to the level of the run.

    A run of less than a level says nothing about entries.
    """
    if options.subject != VLLM or not options.whole:
        return []
    known, here = ledger.load(ledger.LEDGER), version("vllm") or ""
    levels = list(Level)
    return [
        f"ledger entry '{issue.id}' matches no pair of level {level}: mend its patterns, or remove it"
        for level in levels[: levels.index(options.level) + 1]
        for issue in known.unmatched(ids(level, options.backend), options.backend, here)
        if issue.level is level
    ]


def left_out(options: Options) -> str:
    """What was not run: the subject's fault cannot show in it, or no reference is written for it."""
    reasons = {
        f"which {options.subject} cannot change": options.left_out(),
        "for whose kernels no reference is written": options.unwritten(),
    }
    return "; ".join(f"{pairs} pair{'s' * (pairs != 1)}, {reason}" for reason, pairs in reasons.items() if pairs)


def ids(level: Level, backend: Backend) -> list[tuple[str, Entry]]:
    """What entries may speak of: pairs, lattice pairs, ``relation:case`` of these, ``question:case`` of pairs that are loaded,
    ``check:case`` of pairs that a GPU is checked with."""
    dense, exact = (
        [pair for pair in of(level) if has_entry(pair[1], backend) and written(*pair, backend)] for of in (pairs, lattice_pairs)
    )
    related = [(f"{relation}:{case.id}", entry) for case, entry in exact for relation in asked(case, entry, backend)]
    loads = [(f"{each.question}:{each.pair.case.id}", each.pair.entry) for each in questions(level, backend)]
    checks = [(f"{each.check}:{each.pair.case.id}", each.pair.entry) for each in device_checks.of(level, backend)]
    return [*((case.id, entry) for case, entry in (*dense, *exact)), *related, *loads, *checks, *_loaded_elsewhere(level, backend)]


def _loaded_elsewhere(level: Level, backend: Backend) -> list[tuple[str, Entry]]:
    """What is only loaded, by ``--architecture`` and ``moediff matrix``: also pairs for whose kernels no reference is written."""
    return [(case.id, entry) for case, entry in pairs(level) if entry is Entry.LAYER and SPECS[backend].needs_gpu]


def last_record(directory: Path, worker: str, node_id: str) -> Record | None:
    """The last thing a worker wrote, if it is the record of the test named; None when it ended without one."""
    story = read_worker(path) if (path := worker_file(directory, worker)).exists() else None
    if story is None or story.died_at is not None or not story.records:
        return None
    return story.records[-1] if node_id.endswith(f"[{story.records[-1].pair}]") else None


def gather(directory: Path, crashed: Collection[str] | None = None) -> list[Record]:
    """Merge, write the page, and return every record of the run; ``crashed`` as ``merge`` takes it."""
    from reports import html  # only now: collecting must stay quick

    records = merge(directory, crashed)
    html.write(directory, records)
    return records
