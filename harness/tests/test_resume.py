"""A run that was ended is continued: what has a record is left out, what it was at is run again."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cases.case import Entry, Level
from harness.backends import Backend
from harness.environment import child_environ
from harness.exits import Misuse
from harness.pairs import Pair, select
from harness.suite import order, outputs, resume
from harness.suite.options import Options, parse_run
from harness.tests.test_run import pytest_run
from harness.verdict import Outcome, Verdict
from reports.records import Record, Recorder, RecordsUnwritable, Start, Status, merge, read, read_run, read_worker, worker_file

FUSED = [pair for pair in select(Level.SMOKE) if pair.entry is Entry.FUSED_EXPERTS]
PASSED = Verdict(outcome=Outcome.PASS, claim="inside the bound", margin=0.25)
FAKE = {"subject": "fake", "torch": "2.14.0"}
H200 = {"subject": "vllm 0.33.0 (cuda)", "vllm": "0.33.0", "gpus": "NVIDIA H200, NVIDIA H200"}


def _start(pair: Pair, worker: str, environment: dict[str, str] = FAKE) -> Start:
    return Start(case=pair.case.id, entry=pair.entry, backend="triton", fields={}, environment=environment, worker=worker)


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """Two workers: one was killed in its third pair, the other while it wrote the record of its second."""
    for worker, pairs in (("gw0", FUSED[:3]), ("gw1", FUSED[3:5])):
        recorder = Recorder(tmp_path, worker)
        recorder.opened("stub", 0.5)
        for pair in pairs:
            recorder.started(start := _start(pair, worker))
            recorder.stage("load")
            if pair is not FUSED[2]:
                recorder.finished(Record.of(start, verdict=PASSED, status=Status.CLEAN))
        recorder.close()
    with worker_file(tmp_path, "gw1").open("rb+") as file:
        file.truncate(worker_file(tmp_path, "gw1").stat().st_size - 40)
    return tmp_path


def _options(directory: Path | None, backend: Backend = Backend.TRITON, subject: str = "fake", architecture: str = "") -> Options:
    return Options(
        backend=backend,
        level=Level.SMOKE,
        cases=(),
        entry=None,
        subject=subject,
        records=Path("out"),
        architecture=architecture,
        resume=directory,
        whole=True,
    )


def _recorded(run: Path, environment: dict[str, str], verdict: Verdict = PASSED) -> Path:
    recorder = Recorder(run, "gw0")
    recorder.finished(Record.of(_start(FUSED[0], "gw0", environment), verdict=verdict, status=Status.CLEAN))
    recorder.close()
    return run


def test_what_was_finished_is_known_and_what_was_not_is_taken_out(ended: Path) -> None:
    assert resume.recorded(_options(ended)) == {FUSED[0].id, FUSED[1].id, FUSED[3].id}
    assert [read_worker(worker_file(ended, worker)).died_at for worker in ("gw0", "gw1")] == [None, None]
    again = Recorder(ended, "gw1")  # appends behind what is whole
    again.finished(Record.of(_start(FUSED[4], "gw1"), verdict=PASSED, status=Status.CLEAN))
    again.close()
    assert sorted(record.pair for record in merge(ended)) == sorted({FUSED[i].id for i in (0, 1, 3, 4)})


def test_a_run_that_was_continued_and_killed_is_read_as_far_as_it_got(ended: Path) -> None:
    merge(ended)
    resume.recorded(_options(ended))
    again = Recorder(ended, "gw0")
    again.started(_start(FUSED[5], "gw0"))
    again.close()
    left = {record.pair: record.verdict.signature for record in read_run(ended)}
    assert left == {FUSED[i].id: "" for i in (0, 1, 3)} | {FUSED[5].id: "WORKER_ENDED@prepare"}


def test_a_run_of_another_backend_or_none_at_all_is_misuse(ended: Path, tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="was on backend 'triton', not 'marlin': say --backend triton"):
        resume.recorded(_options(ended, Backend.MARLIN))
    with pytest.raises(Misuse, match="holds no records of a run; --resume takes a directory that a run made"):
        parse_run(str(tmp_path / "none"))
    assert resume.recorded(_options(None)) == frozenset()


@pytest.mark.parametrize(
    ("environment", "subject", "architecture", "differs"),
    [
        (FAKE, "vllm", "", "subject 'fake', not 'vllm (cuda)' and vLLM 'none', not '0.33.0' and GPU 'none', not 'NVIDIA H200':"),
        (H200, "fake", "", r"subject 'vllm (cuda)', not 'fake':"),
        ({"subject": "fake with W_SCALE_SKIPPED"}, "fake", "", "subject 'fake:W_SCALE_SKIPPED', not 'fake':"),
        (H200 | {"vllm": "0.32.1", "subject": "vllm 0.32.1 (cuda)"}, "vllm", "", "vLLM '0.32.1', not '0.33.0':"),
        (H200 | {"gpus": "NVIDIA B200"}, "vllm", "", "GPU 'NVIDIA B200', not 'NVIDIA H200':"),
        (H200 | {"architecture": "sm90"}, "vllm", "", "--architecture 'sm90', not 'none':"),
        (H200 | {"architecture": "sm90", "subject": "vllm 0.33.0 (interpreter)"}, "vllm", "sm100", "--architecture 'sm90', not 'sm100':"),
        ({}, "fake", "", "subject 'none', not 'fake':"),
    ],
)
def test_records_of_something_else_are_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], subject: str, architecture: str, differs: str
) -> None:
    monkeypatch.setattr(resume, "version", lambda package: "0.33.0")
    monkeypatch.setattr(resume, "gpu_names", lambda: ("NVIDIA H200",))
    with pytest.raises(Misuse, match=re.escape(f"was of {differs} run without --resume, or name a run like this one")):
        resume.recorded(_options(_recorded(tmp_path, environment), subject=subject, architecture=architecture))


@pytest.mark.parametrize(
    ("environment", "subject", "architecture"),
    [
        (H200, "vllm", ""),
        (H200 | {"architecture": "sm100", "subject": "vllm 0.33.0 (interpreter)", "gpus": ""}, "vllm", "sm100"),
        ({"subject": "fake with W_SCALE_SKIPPED"}, "fake:W_SCALE_SKIPPED", ""),
    ],
)
def test_records_of_the_same_are_continued_whatever_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], subject: str, architecture: str
) -> None:
    monkeypatch.setattr(resume, "version", lambda package: "0.33.0")
    monkeypatch.setattr(resume, "gpu_names", lambda: ("NVIDIA H200",))
    monkeypatch.setattr(resume, "commit", lambda: "now")
    options = _options(_recorded(tmp_path, environment | {"commit": "then"}), subject=subject, architecture=architecture)
    assert resume.recorded(options) == {FUSED[0].id}
    assert "records of harness commit then, and this is now; `python -m harness.rejudge " in resume.other_commits(options)
    monkeypatch.setattr(resume, "commit", lambda: "then")
    assert resume.other_commits(options) == ""


@pytest.mark.parametrize("half", [b'{"started": {"ca', b'{"stage": "lo', b'{"finished": {', b'{"opened": {"subj', b"{", b""])
def test_a_worker_may_be_killed_in_any_of_its_lines(ended: Path, half: bytes) -> None:
    path = worker_file(ended, "gw0")
    whole = path.read_bytes().split(b'{"started"')
    path.write_bytes(b'{"started"'.join(whole[:3]) + half)
    assert resume.recorded(_options(ended)) == {FUSED[0].id, FUSED[1].id, FUSED[3].id}
    assert path.read_bytes() == b'{"started"'.join(whole[:3])


def test_a_file_that_cannot_be_read_or_cut_is_told(ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "truncate", full)
    with pytest.raises(RecordsUnwritable, match=r"worker-gw0.jsonl cannot be written \(No space left on device\)"):
        resume.recorded(_options(ended))
    worker_file(ended, "zz").mkdir()
    with pytest.raises(Misuse, match=r"worker-zz.jsonl', so the run is not continued: take that file away"):
        resume.recorded(_options(ended))


def test_every_record_must_be_of_what_runs_now(ended: Path) -> None:
    recorder = Recorder(ended, "gw9")
    recorder.finished(Record.of(_start(FUSED[6], "gw9", {"subject": "fake with W_SCALE_SKIPPED"}), verdict=PASSED, status=Status.CLEAN))
    recorder.close()
    with pytest.raises(Misuse, match="was of subject 'fake:W_SCALE_SKIPPED', not 'fake'"):
        resume.recorded(_options(ended))


def test_named_cases_have_no_level(tmp_path: Path) -> None:
    begun = replace(_options(tmp_path / "20261130-120000-triton-smoke-77"), level=Level.NIGHTLY)
    assert "began at level smoke and goes on at nightly" in resume.other_level(begun)
    assert resume.other_level(replace(begun, cases=(FUSED[0].case.id,))) == ""
    assert resume.other_level(replace(begun, resume=None)) == ""


@pytest.mark.parametrize("foreign", [b"a log\nof something\n", b"\x00\xff\x7fELF", b'{"a": 1}\n{"b": 2}', b'{"opened": 3}\n{"sta', b"[1"])
def test_a_file_that_no_worker_wrote_stays_as_it_is_and_so_do_the_others(ended: Path, foreign: bytes) -> None:
    worker_file(ended, "zz").write_bytes(foreign)
    before = {path: path.read_bytes() for path in ended.iterdir()}
    with pytest.raises(Misuse, match=r"worker-zz.jsonl:\d: not a record.*, so the run is not continued: take that file away"):
        resume.recorded(_options(ended))
    assert {path: path.read_bytes() for path in ended.iterdir()} == before


def test_a_run_of_named_cases_does_not_become_one_of_a_level(ended: Path) -> None:
    cases = ended.rename(ended.with_name("20261130-120000-triton-cases-77"))
    with pytest.raises(Misuse, match="a run of named cases: name them again"):
        resume.recorded(_options(cases))
    assert resume.recorded(replace(_options(cases), cases=(FUSED[0].case.id,)))


def test_a_refusal_cuts_nothing(ended: Path) -> None:
    before = {path: path.read_bytes() for path in ended.iterdir()}
    for options in (_options(ended, Backend.MARLIN), _options(ended, subject="fake:W_SCALE_SKIPPED")):
        with pytest.raises(Misuse):
            resume.recorded(options)
    assert {path: path.read_bytes() for path in ended.iterdir()} == before


@pytest.mark.parametrize(
    ("outcome", "signature", "again"),
    [
        (Outcome.RUN_ERROR, "OUT_OF_MEMORY@run", True),
        (Outcome.RUN_ERROR, "CUDA_CONTEXT_LOST@load", True),
        (Outcome.UNAVAILABLE, "", True),
        (Outcome.RUN_ERROR, "RuntimeError: other", False),
    ],
)
def test_what_failed_for_want_of_a_device_is_asked_again_and_the_answer_stands(
    tmp_path: Path, outcome: Outcome, signature: str, again: bool
) -> None:
    failed = Verdict(outcome=outcome, claim="it runs", signature=signature)
    _recorded(tmp_path, FAKE, failed)
    assert (resume.recorded(_options(tmp_path)) == frozenset()) is again
    assert [record.verdict for record in merge(tmp_path)] == [failed]
    _recorded(tmp_path, FAKE, failed)  # asked, and no better
    assert [record.verdict for record in merge(tmp_path)] == [failed] * (1 if again else 2)
    _recorded(tmp_path, FAKE)
    assert resume.recorded(_options(tmp_path)) == {FUSED[0].id}
    if again:
        assert [record.verdict for record in merge(tmp_path)] == [PASSED]


def test_the_run_ends_with_2_and_a_sentence_where_it_is_not_continued(tmp_path: Path) -> None:
    run = _recorded(tmp_path / "run", {"subject": "fake with W_SCALE_SKIPPED"})
    case = [f"--case={FUSED[1].case.id}", f"--resume={run}", f"--backend={Backend.TRITON}"]
    ended = pytest_run(tmp_path, *case, "-n1")
    assert ended.code == 2
    assert ended.errors.startswith(f"moediff: the run in '{run}' was of subject 'fake:W_SCALE_SKIPPED', not 'fake'")
    assert "Traceback" not in ended.errors + ended.text


def test_a_run_goes_on_in_its_directory_and_says_what_all_of_it_found(tmp_path: Path) -> None:
    first = [f"--case={pair.case.id}" for pair in FUSED[:2]]
    more = [f"--case={pair.case.id}" for pair in FUSED[:4]]
    assert pytest_run(tmp_path, *first, "--entry=fused_experts", "-n1", STUB_FAIL="0").code == 1
    (directory,) = tmp_path.iterdir()
    before = read(directory / "records.jsonl")
    gave = outputs.file_of(directory, FUSED[3].id)  # in an attempt that has no record
    gave.parent.mkdir(exist_ok=True)
    gave.touch()
    ended = pytest_run(tmp_path, *more, "--entry=fused_experts", "-n1", f"--resume={directory}")
    assert not gave.exists()
    assert [directory] == list(tmp_path.iterdir())
    assert sorted(ended.records) == sorted(pair.id for pair in FUSED[:4])
    assert all(ended.records[record.pair] == record for record in before)
    assert ended.code == 1  # what was new before is still new
    assert pytest_run(tmp_path, *more, "--entry=fused_experts", "-n1", "-k=zzzz", f"--resume={directory}").code == 5
    nothing_left = pytest_run(tmp_path, *more, "--entry=fused_experts", "-n1", f"--resume={directory}")
    assert (nothing_left.code, nothing_left.records) == (ended.code, ended.records)


def _resumed(run: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness.cli", "run", "--subject=fake", "--backend=triton", "-n1", f"--resume={run}", *arguments]
    outside = {name: value for name, value in child_environ().items() if not name.startswith("PYTEST_")}
    environ = {**outside, "PYTEST_PLUGINS": "harness.tests.stub_run"}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=run.parent, env=environ, timeout=300)


def test_what_matches_nothing_is_misuse_and_what_is_done_is_not(tmp_path: Path) -> None:
    run = _recorded(tmp_path / "20261130-120000-triton-smoke-77", FAKE)
    nothing = _resumed(run, "-k", "zzzz")
    assert (nothing.returncode, nothing.stderr.count("\n")) == (2, 1), nothing.stdout
    assert nothing.stderr.startswith("moediff: no pair matches -k 'zzzz'")
    assert "Nothing new" not in nothing.stdout
    one = ["--entry", "fused_experts", "-k", f"test_pair and {FUSED[0].case.id}["]
    done = _resumed(run, *one)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "at level" not in done.stdout
    grown = _resumed(run, *one, "--level", "nightly")
    assert grown.returncode == 0
    assert f"moediff: {run.name} began at level smoke and goes on at nightly: its records are then of both\n" in grown.stdout


def test_refusals_are_one_sentence_of_moediff(tmp_path: Path) -> None:
    run = _recorded(tmp_path / "run", {"subject": "fake with W_SCALE_SKIPPED"})
    for arguments, says in (([], "was of subject"), (["--records=elsewhere"], "keeps its directory")):
        ended = _resumed(run, FUSED[1].case.id, *arguments)
        assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
        assert ended.stderr.startswith("moediff: ")
        assert says in ended.stderr
    assert not (tmp_path / "elsewhere").exists()


def _item(pair: Pair | None, asked: str = "pair") -> Any:
    if pair is None:
        return SimpleNamespace(name="about no pair")
    about = pair if asked == "pair" else SimpleNamespace(pair=pair, id=f"{asked}:{pair.id}")
    return SimpleNamespace(name=asked, callspec=SimpleNamespace(params={asked: about}))


def test_what_launches_the_same_kernels_stands_together() -> None:
    pairs = [pair for pair in select(Level.NIGHTLY) if pair.case.hidden in (64, 128)][:400]
    items = [*(_item(pair) for pair in pairs), *(_item(pair, "related") for pair in pairs[:50]), _item(None)]
    ordered = order.by_kernel(items)
    assert ordered[0].name == "about no pair"
    keys = [order.kernels(pair) for item in ordered if (pair := order.pair_of(item)) is not None]
    assert len(keys) == 450
    assert sum(here != there for here, there in pairwise(keys)) == len(set(keys)) - 1
    assert len(set(keys)) < len(pairs)
    assert order.by_kernel(items) == ordered
