"""Ctrl-C: what was finished is kept, what was not is no news, and the exit code says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cases.case import Level
from harness.cli import main
from harness.environment import child_environ
from harness.exits import Exit
from harness.pairs import select
from reports.records import Status, read

ROOT = Path(__file__).parent.parent.parent
PYTEST = ["pytest", "-p", "harness.tests.stub_run", "-p", "no:cacheprovider", "harness/suite"]
MOEDIFF = ["harness.cli", "run"]
ASKED = len(select(Level.SMOKE))


def finished(directory: Path) -> int:
    return sum(line.startswith('{"finished"') for path in directory.glob("*/worker-*.jsonl") for line in path.read_text().splitlines())


def interrupted(command: list[str], tmp_path: Path, *, group: bool, after: int = 4, **environ: str) -> subprocess.CompletedProcess[str]:
    """Send SIGINT once ``after`` pairs have finished: to the whole group, as a terminal does, or to the first process only."""
    outside = {name: value for name, value in child_environ().items() if not name.startswith("PYTEST_")}
    given = {**outside, "STUB_SLOW": "0.2", **({} if command[1] == "pytest" else {"PYTEST_PLUGINS": "harness.tests.stub_run"}), **environ}
    with subprocess.Popen(
        [sys.executable, "-m", *command, "--subject=fake", f"--records={tmp_path}"],
        cwd=ROOT,
        env=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs inherit it ignored
    ) as run:
        while finished(tmp_path) < after and run.poll() is None:
            time.sleep(0.05)
        (os.killpg if group else os.kill)(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=120)
    return subprocess.CompletedProcess(command, run.returncode, out, err)


@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("command", [[*MOEDIFF, "-n2"], [*MOEDIFF, "-n0"], [*PYTEST, "-n2"]], ids=["moediff-n2", "moediff-n0", "pytest-n2"])
def test_an_interrupted_run_ends_with_130_and_keeps_what_it_has(command: list[str], group: bool, tmp_path: Path) -> None:
    done = interrupted(command, tmp_path, group=group)
    records = read(next(tmp_path.glob("*/records.jsonl")))
    assert done.returncode == Exit.INTERRUPTED, done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == f"moediff: interrupted after {len(records)} of {ASKED} tests"
    assert 4 <= len(records) < ASKED
    assert {record.status for record in records} == {Status.CLEAN}
    assert f"{ASKED - len(records)} results are missing" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_worker_that_had_died_before_still_leaves_its_pair(tmp_path: Path) -> None:
    done = interrupted([*MOEDIFF, "-n2"], tmp_path, group=True, after=12, STUB_KILL="1")
    records = read(next(tmp_path.glob("*/records.jsonl")))
    assert done.returncode == Exit.INTERRUPTED, done.stdout + done.stderr
    assert [record.verdict.signature for record in records if record.status is Status.NEW] == ["WORKER_ENDED@run"]


def test_any_other_command_that_is_interrupted_ends_with_130_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.commands.listing.main", interrupt)
    assert main(["list"]) == Exit.INTERRUPTED
    assert capsys.readouterr().err == "moediff: interrupted\n"
