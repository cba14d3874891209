"""The same pairs, bytes and seeds in every state: one fresh process per state, side by side."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event

from harness.backends import SPECS, Backend
from harness.bisect.observe import NO_STATE, Observation, unavailable
from harness.bisect.trees import Tree
from harness.bisect.trouble import Exit
from harness.bisect.worker import Task
from harness.gpus import cores, visible_gpus, worker_environment
from harness.pairs import Pair
from harness.verdict import Outcome, Verdict

WORKER = "harness.bisect.worker"
PATIENCE = 900.0  # seconds without a word from a worker
_ROOT = Path(__file__).parent.parent.parent


class WorkerBroke(Exception):
    """The harness itself failed in a worker; holds what it printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRun:
    """What one state did. ``unavailable`` says why it could not be driven at all."""

    tree: Tree
    observations: dict[str, Observation]  # by pair id
    subject: str = ""
    unavailable: str = ""
    open_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run in every state."""

    pairs: tuple[Pair, ...]
    backend: Backend
    subject: str = "vllm"
    controls: bool = False
    script: Path | None = None  # a Python program of the user's instead of pairs


def run(trees: Sequence[Tree], plan: Plan, *, keep: Path | None = None) -> list[StateRun]:
    """Every pair in every tree, as many trees at once as there are cores. ``keep``: a folder for tensors, one subfolder per state.

    Raises:
        WorkerBroke: the harness itself failed.
    """
    stop = Event()
    with ThreadPoolExecutor(max_workers=max(1, min(cores(), len(trees)))) as pool:
        jobs = [pool.submit(run_one, tree, plan, keep=keep and keep / str(i), lane=i, stop=stop) for i, tree in enumerate(trees)]
        try:
            return [job.result() for job in jobs]
        except BaseException:
            stop.set()  # leaving the pool waits for its threads
            raise


def run_one(tree: Tree, plan: Plan, *, keep: Path | None = None, lane: int = 0, stop: Event | None = None) -> StateRun:
    """Every pair in one tree. A worker that dies is named by the pair it died in, and another goes on with the rest.

    Raises:
        WorkerBroke: the harness itself failed, or ``stop`` was set meanwhile.
    """
    stop = stop or Event()
    if plan.script:
        return _run_script(plan.script, tree, plan.backend, lane)
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
    story = _Story()
    with tempfile.TemporaryDirectory(prefix="moediff-") as folder:
        while left := [pair for pair in plan.pairs if pair.id not in story.observations]:
            task = Task(
                pairs=tuple((pair.case.id, pair.entry.value) for pair in left),
                backend=plan.backend.value,
                subject=plan.subject,
                tree=str(tree.sources or ""),
                events=str(Path(folder) / "events.jsonl"),
                keep=str(keep) if keep else "",
                controls=plan.controls,
            )
            code = _work(task, tree, plan.backend, lane, Path(folder), stop)
            story = story.read(Path(task.events))
            if story.unavailable or code == Exit.GOOD:
                break
            story = story.died(code, (Path(folder) / "stderr").read_text(errors="replace"))
    return StateRun(
        tree=tree,
        observations={pair.id: unavailable(pair.id, story.unavailable, NO_STATE) for pair in plan.pairs} | story.observations,
        subject=story.subject,
        unavailable=story.unavailable,
        open_seconds=story.open_seconds,
    )


def environment(tree: Tree, backend: Backend, lane: int = 0) -> dict[str, str]:
    """The environment of a process that drives ``tree``: its folders first on the path, then this source tree."""
    users = filter(None, [os.environ.get("PYTHONPATH")])
    paths = [*map(str, tree.paths), *([] if _ROOT.name == "site-packages" else [str(_ROOT)]), *users]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": ""}
    return {**os.environ, **worker_environment(backend, f"gw{lane}", visible_gpus()), **dict(SPECS[backend].environment), **own}


def _run_script(script: Path, tree: Tree, backend: Backend, lane: int) -> StateRun:
    """The user's own check, by the exit codes of ``git bisect run``; what failed is the last line it printed on stderr."""
    name = script.name
    command = [sys.executable, "-P", str(script.resolve())]
    with tempfile.TemporaryDirectory(prefix="moediff-") as folder:
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment(tree, backend, lane), stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=PATIENCE, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            sentence = f"{name} did not end within {PATIENCE:.0f} s"
            return StateRun(tree=tree, observations={name: unavailable(name, sentence)}, unavailable=sentence)
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it said nothing on stderr")
    last = re.sub(r"^\[rank\d+\]: ", "", last)  # torch.distributed's exception hook
    code = done.returncode
    if code == Exit.GOOD:
        return StateRun(
            tree=tree, observations={name: Observation(pair=name, verdict=Verdict(outcome=Outcome.PASS, claim=f"{name} passes"))}
        )
    if code == Exit.CANNOT_TELL or code >= Exit.MISUSE or code == -signal.SIGKILL:
        return StateRun(tree=tree, observations={name: unavailable(name, f"{name} ended with {code}: {last}")})
    said = last if code > 0 else signal.Signals(-code).name
    verdict = Verdict(outcome=Outcome.RUN_ERROR, claim=f"{name} passes; it ended with exit code {code}", detail=last, signature=said)
    return StateRun(tree=tree, observations={name: Observation(pair=name, verdict=verdict)})


def _work(task: Task, tree: Tree, backend: Backend, lane: int, folder: Path, stop: Event) -> int:
    """Run one worker to its end; its exit code, negative for a signal, -SIGALRM for one that was silent too long.

    Its stdin is a pipe that nothing is written to: it closes when this process dies, whichever way, and the worker ends.
    """
    task.write(folder / "task.json")
    events = Path(task.events)
    events.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", WORKER, str(folder / "task.json")]
    with (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(tree, backend, lane), stdin=subprocess.PIPE, stdout=stderr, stderr=stderr
        )
        try:
            heard = time.monotonic()
            size = 0
            while (code := process.poll()) is None:
                if stop.wait(0.05):
                    raise WorkerBroke("another state's worker broke")
                if events.exists() and events.stat().st_size != size:
                    size, heard = events.stat().st_size, time.monotonic()
                if time.monotonic() - heard > PATIENCE:
                    return -signal.SIGALRM
            return code
        finally:
            process.kill()
            process.communicate()


@dataclass(frozen=True, slots=True)
class _Story:
    """What the workers of one state have told so far."""

    observations: dict[str, Observation] = field(default_factory=dict)
    started: str = ""
    subject: str = ""
    unavailable: str = ""
    open_seconds: float = 0.0

    def read(self, events: Path) -> _Story:
        story = self
        lines = events.read_text(encoding="utf-8").splitlines(keepends=True) if events.exists() else []
        for line in lines:
            if not line.endswith("\n"):
                break  # a killed worker's last line
            match json.loads(line):
                case {"opened": {"subject": subject, "seconds": seconds}}:
                    story = replace(story, subject=subject, open_seconds=seconds)
                case {"unavailable": sentence}:
                    story = replace(story, unavailable=sentence)
                case {"started": pair}:
                    story = replace(story, started=pair)
                case {"observed": given}:
                    seen = Observation.from_dict(given)
                    story = replace(story, started="", observations=story.observations | {seen.pair: seen})
        return story

    def died(self, code: int, said: str) -> _Story:
        """A signal's victim is an observation of the pair in progress; any other end is ours."""
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
        if code >= 0 or not self.started:
            if code >= 0:
                raise WorkerBroke(f"a worker ended with exit code {code}:\n{said}")
            return replace(self, unavailable=f"the process ended by {signal.Signals(-code).name} outside of any pair: {last}")
        name = signal.Signals(-code).name
        if -code == signal.SIGALRM:
            seen = unavailable(self.started, f"nothing was heard from this pair for {PATIENCE:.0f} s: the process was ended")
        elif -code == signal.SIGKILL:
            seen = unavailable(self.started, "the process was killed from outside (memory?): run fewer states at once")
        else:
            detail = f"the process ended by {name} in this pair: {last}"
            seen = Observation(
                pair=self.started, verdict=Verdict(outcome=Outcome.RUN_ERROR, claim="the pair runs", detail=detail, signature=name)
            )
        return replace(self, started="", observations=self.observations | {seen.pair: seen})
