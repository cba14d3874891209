"""The same pairs in several states, each in a process of its own: what each way of failing becomes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cases.case import Entry
from harness.backends import Backend
from harness.bisect import states
from harness.bisect.cache import Cache
from harness.bisect.differences import Stage, Symptom, compare, first_difference
from harness.bisect.observe import Observation, kept_name
from harness.bisect.spec import parse
from harness.bisect.states import Plan, StateRun, WorkerBroke, run, run_one
from harness.bisect.tests.repos import fake_installation
from harness.bisect.trees import Tree, planted
from harness.bisect.trouble import Exit
from harness.bisect.worker import Task
from harness.pairs import Pair, parse_case
from harness.verdict import Outcome

PAIR = Pair(parse_case("int8-channel-static-quark-silu-fp16-e4k2m8h128i64-balanced"), Entry.FUSED_EXPERTS)
OTHER = Pair(parse_case("bf16-none-none-plain-silu-bf16-e4k2m8h128i64-balanced"), Entry.FUSED_EXPERTS)
PLAN = Plan(pairs=(PAIR,), backend=Backend.INTERPRETER)
INIT = "STATE = {!r}\n"


@pytest.fixture(autouse=True)
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "WORKER", "harness.bisect.tests.fake_worker")


def tree(folder: Path, source: str) -> Tree:
    (folder / "checkout" / "vllm").mkdir(parents=True)
    (folder / "checkout" / "vllm" / "__init__.py").write_text(source)
    installed = fake_installation(folder / "site-packages")
    with planted(parse(f"S=dir:{folder / 'checkout'}", None), Cache(folder / "cache"), installed) as made:
        return made


def drive(folder: Path, source: str, plan: Plan = PLAN) -> StateRun:
    return run_one(tree(folder, source), plan)


def seen(folder: Path, state: str, plan: Plan = PLAN) -> Observation:
    return drive(folder, INIT.format(state), plan).observations[PAIR.id]


def test_two_states_side_by_side_and_where_they_differ_first(tmp_path: Path) -> None:
    trees = [tree(tmp_path / name, INIT.format(state)) for name, state in (("a", "honest"), ("b", "W_SCALE_FLAT_INDEX"))]
    good, bad = run(trees, PLAN, keep=tmp_path / "kept")
    before, after = good.observations[PAIR.id], bad.observations[PAIR.id]
    assert (before.verdict.outcome, after.verdict.outcome) == (Outcome.PASS, Outcome.MISMATCH)
    assert after.signature.startswith("MISMATCH W_SCALE_FLAT_INDEX@")
    assert Observation.from_dict(after.to_dict()) == after
    difference = compare(before, after)
    assert difference is not None
    assert (difference.stage, difference.symptom) == (Stage.RUN, Symptom.NUMERIC)
    first = first_difference(difference, *(tmp_path / "kept" / each / kept_name(PAIR.id) for each in "01"))
    assert first.startswith("loading is bit for bit alike; the output differs first at [0, 0]: ")
    assert compare(before, before) is None


def test_more_parameter_bytes_are_a_symptom_and_the_parameter_is_named(tmp_path: Path) -> None:
    trees = [tree(tmp_path / name, INIT.format(state)) for name, state in (("a", "honest"), ("b", "fat"))]
    runs = run(trees, PLAN, keep=tmp_path / "kept")
    difference = compare(*(each.observations[PAIR.id] for each in runs))
    assert difference is not None
    assert (difference.stage, difference.symptom) == (Stage.LOAD, Symptom.MEMORY)
    first = first_difference(difference, *(tmp_path / "kept" / each / kept_name(PAIR.id) for each in "01"))
    assert first == "loading differs first in parameter 0.down_proj.weight: int8 [128, 64] -> int8 [384, 64]"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("import does_not_exist\n", "importing vllm failed: ModuleNotFoundError: No module named 'does_not_exist' (vllm/__init__.py:1)"),
        ("\nSTATE = (\n", "importing vllm failed: SyntaxError: '(' was never closed (vllm/__init__.py:2)"),
        ("raise RuntimeError('no')\n", "importing vllm failed: RuntimeError: no (vllm/__init__.py:1)"),
        (INIT.format("unknown surface"), "the surface of vllm 9.9 is not recognised"),
        ("import os\nos.kill(os.getpid(), 11)\n", "the process ended by SIGSEGV outside of any pair: "),
    ],
)
def test_a_state_that_cannot_be_driven_says_why(tmp_path: Path, source: str, sentence: str) -> None:
    done = drive(tmp_path, source)
    assert done.unavailable == sentence
    assert [each.verdict.outcome for each in done.observations.values()] == [Outcome.UNAVAILABLE]


def test_a_crash_is_seen_and_the_next_pair_still_runs(tmp_path: Path) -> None:
    plan = Plan(pairs=(PAIR, OTHER), backend=Backend.INTERPRETER)
    done = drive(tmp_path, INIT.format("segfault"), plan)
    assert [each.signature for each in done.observations.values()] == ["RUN_ERROR SIGSEGV"] * 2


def test_what_comes_from_outside_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(tmp_path / "a", "killed").verdict.detail == "the process was killed from outside (memory?): run fewer states at once"
    assert seen(tmp_path / "b", "unfamiliar").verdict.detail == "no layer factory at vllm.layer:FusedMoE"
    assert seen(tmp_path / "c", "ValueError: refused here").signature == "LOAD_ERROR ValueError: refused here"
    assert not seen(tmp_path / "c2", "KeyError: 'weight_scale'").cannot_import
    assert seen(tmp_path / "d", "ModuleNotFoundError: No module named 'vllm.gone'").cannot_import
    monkeypatch.setattr(states, "PATIENCE", 8.0)
    hung = seen(tmp_path / "e", "hang")
    assert (hung.verdict.outcome, hung.verdict.detail) == (
        Outcome.UNAVAILABLE,
        "nothing was heard from this pair for 8 s: the process was ended",
    )


def test_a_vllm_from_elsewhere_is_noticed(tmp_path: Path) -> None:
    planted_tree = tree(tmp_path / "a", INIT.format("honest"))
    other = tree(tmp_path / "b", INIT.format("honest"))
    (planted_tree.paths[0] / "vllm" / "__init__.py").unlink()
    (planted_tree.paths[0] / "vllm").rename(planted_tree.paths[0] / "gone")
    done = run_one(replace(planted_tree, paths=(*planted_tree.paths, *other.paths)), PLAN)
    assert done.unavailable.startswith(f"vllm would be imported from {other.paths[0]}/vllm instead of {planted_tree.paths[0]}")


def test_an_expert_without_tokens_is_a_control(tmp_path: Path) -> None:
    plan = Plan(pairs=(PAIR,), backend=Backend.INTERPRETER, controls=True)
    assert seen(tmp_path, "honest", plan).control == "identical"


@pytest.mark.parametrize(
    ("source", "signature"),
    [
        ("import vllm; assert vllm.STATE == 'here'", "PASS"),
        ("import sys; sys.stderr.write('[rank0]: KeyError: 7\\n'); sys.exit(3)", "RUN_ERROR KeyError: 7"),
        ("raise KeyError('weight_scale')", "RUN_ERROR KeyError: 'weight_scale'"),
        ("import sys; sys.stderr.write('old\\n'); sys.exit(125)", "UNAVAILABLE PAIR"),
        ("import os; os.abort()", "RUN_ERROR SIGABRT"),
    ],
)
def test_a_script_judges_by_its_exit_code(tmp_path: Path, source: str, signature: str) -> None:
    script = tmp_path / "check.py"
    script.write_text(source)
    done = drive(tmp_path, INIT.format("here"), Plan(pairs=(), backend=Backend.INTERPRETER, script=script))
    assert [(name, each.signature) for name, each in done.observations.items()] == [("check.py", signature)]


def test_a_worker_that_breaks_by_itself_is_our_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerBroke, match=r"No module named 'harness\.gone'"):
        drive(tmp_path / "a", "import harness.gone\n")
    monkeypatch.setattr(states, "WORKER", "harness.bisect.tests.no_such_worker")
    with pytest.raises(WorkerBroke, match="a worker ended with exit code 1"):
        drive(tmp_path / "b", INIT.format("honest"))


def test_interrupting_ends_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = [tree(tmp_path / name, INIT.format("hang")) for name in "ab"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it ignored
    try:
        threading.Timer(4.0, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            run(trees, PLAN)
    finally:
        signal.signal(signal.SIGINT, before)


def test_workers_do_not_outlive_whoever_started_them(tmp_path: Path) -> None:
    made = tree(tmp_path, INIT.format("hang"))
    task = Task(pairs=((PAIR.case.id, PAIR.entry.value),), backend="interpreter", subject="vllm", tree="", events=str(tmp_path / "events"))
    task.write(tmp_path / "task.json")
    command = [sys.executable, "-P", "-m", states.WORKER, str(tmp_path / "task.json")]
    worker = subprocess.Popen(command, env=states.environment(made, Backend.INTERPRETER), stdin=subprocess.PIPE)
    while "started" not in ((tmp_path / "events").read_text() if (tmp_path / "events").exists() else ""):
        assert worker.poll() is None
        time.sleep(0.05)
    assert worker.stdin is not None
    worker.stdin.close()  # as the system does when the parent dies
    assert worker.wait(timeout=60) == Exit.MISUSE


def test_the_tree_comes_first_on_the_path(tmp_path: Path) -> None:
    made = tree(tmp_path, INIT.format("honest"))
    assert states.environment(made, Backend.INTERPRETER)["PYTHONPATH"].split(os.pathsep)[0] == str(made.paths[0])
