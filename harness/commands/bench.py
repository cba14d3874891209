"""Measure the harness itself: what the README's numbers are made of."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.table import Table

from cases.case import Level
from harness.backends import Backend
from harness.commands import bench_exact, bench_lanes
from harness.commands.output import draw
from harness.commands.run import SUITE
from harness.environment import child_environ, environment
from harness.exits import Exit, Misuse
from harness.preflight import check
from harness.relations import EXACT
from harness.suite.options import parse_backend
from reports.records import MERGED, read, read_worker, worker_files

_REPEATS = 5
_COLLECT = f"""
import json, sys, time
began = time.perf_counter()
import pytest

class Watch:
    def pytest_collection_finish(self, session):
        self.seconds = time.perf_counter() - began
        asked = [set(item.fixturenames) for item in session.items]
        self.pairs = sum("pair" in names for names in asked)
        self.relations = sum("related" in names for names in asked)
        self.imported = sorted({{"torch", "vllm", "triton", "numpy"}} & set(sys.modules))

watch = Watch()
arguments = ["-p", "harness.suite.plugin", "-p", "no:cacheprovider", "--collect-only", "-qq", "--level", sys.argv[1]]
code = pytest.main([{str(SUITE)!r}, *arguments], plugins=[watch])
print("\\n" + json.dumps({{"code": int(code), **vars(watch)}}))
"""


def main(arguments: Namespace) -> int:
    """Raises Misuse."""
    bench, _ = BENCHES[arguments.what]
    return bench(parse_backend(arguments.backend))


def smoke(backend: Backend) -> int:
    """The smoke level once, as `moediff run` does it."""
    check(backend, "vllm")
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        command = [sys.executable, "-m", "harness.cli", "run", "--backend", backend, "--records", scratch]
        code = subprocess.run(command, check=False, env=child_environ()).returncode
        wall = time.perf_counter() - began
        directories = list(Path(scratch).iterdir())
        if not directories:
            raise Misuse(f"the run wrote no records and ended with exit code {code}; its own words are above")
        records = read(directories[0] / MERGED)
        stories = [read_worker(path) for path in worker_files(directories[0])]
    seconds = [sum(record.seconds.values()) for record in records if record.seconds]
    opening = [story.open_seconds for story in stories if story.open_seconds is not None]
    here = environment()
    table = _table(f"smoke on {backend}: vLLM {here.get('vllm')}, {here['cpu']}, {here['cores']} cores")
    table.add_row("(case, entry) pairs", str(len(records)))
    table.add_row("wall time, everything", f"{wall:.1f} s")
    table.add_row("workers", str(len(stories)))
    table.add_row("importing and preparing vLLM, per worker", ", ".join(f"{each:.1f} s" for each in opening))
    if seconds:
        ordered = sorted(seconds)
        table.add_row("a pair, median", f"{median(seconds):.3f} s")
        table.add_row("a pair, 95th percentile / slowest", f"{ordered[int(0.95 * (len(ordered) - 1))]:.3f} s / {ordered[-1]:.3f} s")
        for stage in records[0].seconds:
            table.add_row(f"  of it {stage}, median", f"{median(record.seconds.get(stage, 0.0) for record in records):.3f} s")
    table.add_row("peak memory of a worker", f"{max(record.peak_rss_bytes for record in records) / 2**30:.2f} GiB")
    margins = [record.verdict.margin for record in records if record.verdict.outcome == "PASS" and record.verdict.margin is not None]
    table.add_row("margin of passing pairs, median / worst", f"{median(margins):.3f} / {max(margins):.3f}" if margins else "none")
    table.add_row("exit code", str(code))
    draw(table)
    return Exit.AS_THE_LEDGER_SAYS


def collect(_: Backend) -> int:
    """Collecting each level in a process that must not import torch."""
    columns = ("level", "pairs", "exact relations", "seconds, median", "seconds, slowest", "heavy modules imported")
    table = Table(*columns, title=f"collecting, {_REPEATS} times")
    for level in Level.SMOKE, Level.NIGHTLY:
        runs = [collect_once(level) for _ in range(_REPEATS)]
        seconds = [run.seconds for run in runs]
        imported = ", ".join(runs[0].imported) or "none"
        counted = str(runs[0].pairs), str(runs[0].relations)
        table.add_row(level, *counted, f"{median(seconds):.2f}", f"{max(seconds):.2f}", imported)
    draw(table)
    return Exit.AS_THE_LEDGER_SAYS


class Collected(NamedTuple):
    """One collection in a fresh process: pytest imported, configured, every pair and every exact relation a test."""

    pairs: int
    relations: int  # asked of lattice pairs
    seconds: float
    imported: tuple[str, ...]  # heavy modules that got imported


def collect_once(level: Level) -> Collected:
    """Raises Misuse when collecting fails, with pytest's last words."""
    command = [sys.executable, "-c", _COLLECT, level]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=child_environ())
    told = done.stdout.strip().splitlines()[-1:]
    found: dict[str, Any] = json.loads(told[0]) if told and told[0].startswith("{") else {"code": done.returncode}
    if found["code"]:
        raise Misuse(f"collecting level '{level}' ended with exit code {found['code']}: {(done.stderr or done.stdout).strip()[-300:]}")
    return Collected(found["pairs"], found["relations"], found["seconds"], tuple(found["imported"]))


def sensitive(backend: Backend) -> int:
    """Every fault against every smoke case it applies to, and against every exact relation of every smoke lattice."""
    from harness import sensitivity, sensitivity_exact

    draw(sensitivity.table(backend))
    if backend in EXACT:
        draw(sensitivity_exact.table(backend))
    return Exit.AS_THE_LEDGER_SAYS


def _table(title: str) -> Table:
    table = Table("measured", "value", title=title, title_justify="left")
    table.columns[1].justify = "right"
    return table


BENCHES: dict[str, tuple[Callable[[Backend], int], str]] = {
    "smoke": (smoke, "the smoke level: pairs, wall time, seconds a pair, memory"),
    "collect": (collect, "time to collect, and that neither torch nor vLLM is imported for it"),
    "lanes": (bench_lanes.main, "one lane: smoke with warm kernels, pairs a second in a worker, two workers and two GPUs over one"),
    "exact": (bench_exact.main, "the founding fault, scale by scale, and every shape and stride of a scale tensor"),
    "sensitivity": (sensitive, "which faults are caught in which formats, by how much, and by which exact relations"),
}
