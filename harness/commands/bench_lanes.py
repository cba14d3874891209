"""Measure a lane: smoke with warm kernels, pairs a second in a worker, two workers on one GPU and on two, compiling apart."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from cases.case import Level
from harness.backends import SPECS, Backend, declared_refusal, has_entry
from harness.commands.output import draw
from harness.environment import child_environ, environment
from harness.exits import Exit, Misuse
from harness.gpus import visible_gpus, worker_environment
from harness.pairs import Pair, select
from harness.preflight import check
from harness.recipes import written

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SAMPLE = 100  # pairs a worker runs, spread evenly over the level
LARGEST = 512  # H and I
PASSES = 5  # over the sample; a worker's is their median, since one takes a few seconds and a machine has other things to do
_POLL = 0.05  # seconds
_CHILD = """
import json, sys
from pathlib import Path
from harness.backends import Backend
from harness.commands.bench_lanes import worker
backend, number, workers, rendezvous = sys.argv[1:]
told = worker(Backend(backend), int(number), int(workers), Path(rendezvous))
print("\\n" + json.dumps(told))
"""


def sample(backend: Backend, count: int = SAMPLE) -> tuple[Pair, ...]:
    """Smoke pairs that the backend runs, H and I at most 512, evenly spread over the level."""
    runs = [
        pair
        for pair in select(Level.SMOKE)
        if has_entry(pair.entry, backend)
        and declared_refusal(pair.case, pair.entry, backend) is None
        and written(pair.case, pair.entry, backend)
        and max(pair.case.hidden, pair.case.intermediate) <= LARGEST
    ]
    step = max(1, len(runs) // count)
    return tuple(runs[::step][:count])


def worker(backend: Backend, number: int, workers: int, rendezvous: Path) -> dict[str, Any]:
    """One process's part: every pair of the sample once, then, when all ``workers`` are there, ``PASSES`` times against the clock."""
    os.environ.update(worker_environment(backend, f"gw{number}", visible_gpus(), workers))
    if not SPECS[backend].needs_gpu:
        from harness.subject.interpreter.activate import prepare_environment

        prepare_environment()
    from harness.pipeline import run_pair
    from harness.suite.subjects import VLLM, open_subject

    began = time.perf_counter()
    subject = open_subject(VLLM, backend)
    opened = time.perf_counter() - began
    pairs = sample(backend)
    first = [run_pair(*pair, backend, subject).timings for pair in pairs]
    (rendezvous / f"ready-{number}").touch()
    while len(list(rendezvous.glob("ready-*"))) < workers:
        time.sleep(_POLL)
    passes = []
    for _ in range(PASSES):
        began = time.perf_counter()
        timed = [run_pair(*pair, backend, subject).timings for pair in pairs]
        passes.append(time.perf_counter() - began)
    return {"opened": opened, "seconds": statistics.median(passes), "last": passes[-1], "first": first, "timed": timed}


def together(backend: Backend, workers: int, gpus: Sequence[str]) -> list[dict[str, Any]]:
    """What ``workers`` processes measured at the same time on ``gpus``. Raises Misuse when one of them fails, with its last words."""
    where = {**child_environ(), **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})}
    with tempfile.TemporaryDirectory() as rendezvous:
        children = [
            subprocess.Popen(
                [sys.executable, "-c", _CHILD, backend, str(number), str(workers), rendezvous],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=where,
            )
            for number in range(workers)
        ]
        with ThreadPoolExecutor(workers) as readers:  # all at once: a full pipe would stop a child
            endings = [readers.submit(_ended, child, children) for child in children]
        spoken = [ending.result() for ending in endings]
    if failed := [(child.returncode, errors) for child, (_, errors) in zip(children, spoken, strict=True) if child.returncode > 0]:
        raise Misuse(f"a worker of {backend} ended with exit code {failed[0][0]}: {failed[0][1].strip()[-500:]}")
    return [json.loads(words.strip().splitlines()[-1]) for words, _ in spoken]


def _ended(child: subprocess.Popen[str], children: Sequence[subprocess.Popen[str]]) -> tuple[str, str]:
    """What it wrote; when it failed the others, who would wait for it, are ended."""
    words, errors = child.communicate()
    if child.returncode:
        for other in children:
            other.kill()
    return words, errors


def rate(told: Sequence[dict[str, Any]]) -> float:
    """Pairs a second, all workers together, the second time a pair runs."""
    return sum((len(each["timed"]) / float(each["seconds"]) for each in told), 0.0)


def smoke(backend: Backend) -> tuple[float, int]:
    """(seconds of `moediff run`, its exit code)."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "harness.cli", "run", "--backend", backend, "--records", scratch]
        began = time.perf_counter()
        code = subprocess.run(command, check=False, env=child_environ(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
        return time.perf_counter() - began, code


def main(backend: Backend) -> int:
    """The numbers of one lane, on standard error as they come and then as a table."""
    check(backend, "vllm")
    gpus = visible_gpus() if SPECS[backend].needs_gpu else ()
    here = environment()
    title = f"lane {backend}: vLLM {here.get('vllm')}, {here['gpus'] or here['cpu']}, {here['cores']} cores"
    table = Table("measured", "value", title=title, title_justify="left")
    table.columns[1].justify = "right"
    sys.stderr.write(f"{title}; several minutes, the smoke level of the lane among them\n")
    for name, value in measured(backend, gpus):
        sys.stderr.write(f"{name}: {value}\n")
        table.add_row(name, value)
    draw(table)
    return Exit.AS_THE_LEDGER_SAYS


def measured(backend: Backend, gpus: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What is measured, and the value."""
    one = together(backend, 1, gpus[:1])
    first, timed = one[0]["first"], one[0]["timed"]
    yield "importing and preparing vLLM", f"{one[0]['opened']:.1f} s"
    yield f"first runs of {len(first)} pairs over their second: compilation", f"{_total(first, 'run') - _total(first, 'again'):.1f} s"
    yield "pairs a second in one worker, kernels compiled", f"{rate(one):.1f}"
    for stage in timed[0]:
        yield f"  of a pair's time, {stage}", f"{_total(timed, stage) / one[0]['last']:.0%}"
    two = together(backend, 2, gpus[:1])
    alone = max(rate(one), rate(together(backend, 1, gpus[:1])))  # before and after
    yield "two workers on one GPU over one", f"{rate(two) / alone:.2f}"
    apart = f"{rate(together(backend, 2, gpus[:2])) / alone:.2f}" if len(gpus) > 1 else "one GPU here"
    yield "two GPUs over one", apart
    for name in ("once", "again, kernels compiled"):
        wall, code = smoke(backend)
        yield f"smoke, {name}, everything", f"{wall:.0f} s (exit code {code})"


def _total(timings: Sequence[dict[str, float]], stage: str) -> float:
    return sum(each.get(stage, 0.0) for each in timings)
