"""The run as a user starts it, around a stub: exit codes, records, what survives a killed worker. No torch, no vLLM."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from cases.case import Level
from harness.backends import Backend
from harness.environment import child_environ
from harness.pairs import select
from harness.verdict import Outcome
from reports.records import Record, Status, gathered, read

SMOKE = [pair.id for pair in select(Level.SMOKE)]
FIRST = select(Level.SMOKE)[0]
ROOT = Path(__file__).parent.parent.parent


class Ended(NamedTuple):
    code: int
    text: str
    errors: str
    records: dict[str, Record]


def pytest_run(tmp_path: Path, *arguments: str, where: Sequence[str] = ("harness/suite",), **environ: str) -> Ended:
    command = [sys.executable, "-m", "pytest", "-p", "harness.tests.stub_run", "-p", "no:cacheprovider", f"--records={tmp_path}"]
    command += [] if "STUB_LEDGER" in environ else ["--subject=fake"]  # which no ledger speaks of
    outside = {name: value for name, value in child_environ().items() if not name.startswith("PYTEST_")}  # xdist's, around this test
    done = subprocess.run(
        [*command, *where, *arguments],
        cwd=ROOT,
        env={**outside, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    merged = list(tmp_path.glob("*/records.jsonl"))
    return Ended(done.returncode, done.stdout, done.stderr, {record.pair: record for record in read(merged[0])} if merged else {})


def some(count: int) -> list[str]:
    """Options that choose the first ``count`` cases of the level."""
    return [f"--case={case}" for case in dict.fromkeys(pair.case.id for pair in select(Level.SMOKE)[:count])]


def test_what_is_collected_is_what_runs(tmp_path: Path) -> None:
    ended = pytest_run(tmp_path, "-n0", *some(1))
    assert f"collected {len(ended.records)} item" in ended.text
    assert len(ended.records) > 0


def test_checks_of_the_device_without_one_say_why_there_is_none(tmp_path: Path) -> None:
    ended = pytest_run(tmp_path, "--backend=interpreter", where=["harness/suite/test_cuda.py"])
    assert (ended.code, ended.text.count("checks of the device are asked on a GPU's lane only")) == (5, 1)
    assert "checks of the device" not in pytest_run(tmp_path, "--backend=interpreter", "--collect-only", *some(1)).text


def test_markers_are_the_backends(tmp_path: Path) -> None:
    told = pytest_run(tmp_path, "--markers").text
    named = {line.partition(":")[0].removeprefix("@pytest.mark.") for line in told.splitlines() if "on every test of a run of" in line}
    assert named == {backend.replace("-", "_") for backend in Backend}
    assert (
        pytest_run(tmp_path, "-n0", "-m", "not interpreter", "--backend=interpreter", *some(1)).code == pytest.ExitCode.NO_TESTS_COLLECTED
    )
    assert len(pytest_run(tmp_path / "one", "-n0", "-m", "interpreter", "--backend=interpreter", *some(1)).records) > 0


def test_every_pair_of_smoke_has_one_record_and_a_clean_run_ends_with_0(tmp_path: Path) -> None:
    ended = pytest_run(tmp_path, "-n2")
    assert ended.code == 0, ended.text + ended.errors
    assert sorted(ended.records) == sorted(SMOKE)
    assert {record.worker for record in ended.records.values()} == {"gw0", "gw1"}
    assert "Nothing new" in ended.text
    assert next(tmp_path.glob("*/index.html")).is_file()


def test_a_bad_expression_is_one_sentence_and_2_under_plain_pytest_too(tmp_path: Path) -> None:
    ended = pytest_run(tmp_path, "-n2", "-k", "and and")
    assert ended.code == 2
    assert "is not an expression for -k" in ended.text + ended.errors
    assert "INTERNALERROR" not in ended.text


def test_records_that_cannot_be_written_end_with_2_under_plain_pytest_too(tmp_path: Path) -> None:
    ended = pytest_run(tmp_path, "-n1", *some(1), f"--records={Path(__file__) / 'below'}")
    assert ended.code == 2
    assert "records cannot be written to" in ended.text + ended.errors
    assert "Traceback" not in ended.text


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_full_disk_ends_the_run_with_2_and_keeps_what_was_recorded(tmp_path: Path, workers: str) -> None:
    ended = pytest_run(tmp_path, workers, STUB_FULL="30000")
    assert ended.code == 2, ended.text
    (sentence,) = set(re.findall(r"^moediff: .*", ended.errors, re.MULTILINE))
    assert re.search(r"worker-\w+\.jsonl cannot be written \(File too large\); what was written before is kept", sentence)
    assert "Traceback" not in ended.text + ended.errors
    kept = gathered(next(tmp_path.iterdir()), crashed=())
    assert kept
    assert f"{len(SMOKE) - len(kept)} results are missing" in ended.text
    assert {record.verdict.outcome for record in kept} == {Outcome.PASS}


def test_a_backend_without_its_gpu_ends_with_125_under_plain_pytest_too(tmp_path: Path) -> None:
    ended = pytest_run(tmp_path, "-n1", *some(1), "--backend=triton", "--subject=vllm", CUDA_VISIBLE_DEVICES="", NVIDIA_VISIBLE_DEVICES="")
    assert ended.code == 125, ended.text
    assert "needs an NVIDIA GPU" in ended.text + ended.errors
    assert not ended.records


def test_a_mismatch_ends_with_1_and_shows_its_message_without_a_traceback(tmp_path: Path) -> None:
    ended = pytest_run(tmp_path, "-n0", *some(3), STUB_FAIL="1")
    assert ended.code == 1
    assert ended.records[SMOKE[1]].status is Status.NEW
    assert "the stub was told to fail" in ended.text
    assert "test_forward.py:" not in ended.text.partition("FAILURES")[2].partition("short test summary")[0]


def test_a_killed_worker_loses_no_finished_record_and_its_pair_is_reported(tmp_path: Path) -> None:
    ended = pytest_run(tmp_path, "-n2", STUB_KILL="2")
    assert ended.code == 1
    assert sorted(ended.records) == sorted(SMOKE)
    victim = ended.records.pop(SMOKE[2])
    assert (victim.verdict.outcome, victim.verdict.signature) == (Outcome.RUN_ERROR, "WORKER_ENDED@run")
    assert all(record.verdict.outcome is Outcome.PASS for record in ended.records.values())
    assert f"RUN_ERROR {victim.pair}" in ended.text.replace("\n", " ")


def test_an_exception_of_the_harness_is_recorded_and_the_next_pairs_go_on(tmp_path: Path) -> None:
    ended = pytest_run(tmp_path, "-n0", *some(3), STUB_RAISE="1")
    assert ended.code == 1
    assert ended.records[SMOKE[1]].verdict.signature == "HARNESS_RAISED@compare"
    assert len(ended.records) > 2


ISSUE = """
[[issue]]
id = "stubborn"
cases = "{cases}"
entry = "{entry}"
backends = ["interpreter"]
vllm = ">=0.1"
outcome = "{outcome}"
signature = "STUB*"
link = "https://example.invalid/1"
since = "2026-11-30"
note = "The stub was told to fail."
"""


@pytest.fixture
def ledger(tmp_path: Path) -> Callable[..., str]:
    def write(text: str = ISSUE, cases: str = FIRST.case.id, outcome: str = "MISMATCH") -> str:
        (tmp_path / "issues.toml").write_text(text.format(cases=cases, outcome=outcome, entry=FIRST.entry))
        return str(tmp_path / "issues.toml")

    return write


def test_a_failure_the_ledger_knows_is_confirmed_and_ends_with_0(tmp_path: Path, ledger: Callable[..., str]) -> None:
    ended = pytest_run(tmp_path, "-n0", *some(2), STUB_FAIL="0", STUB_LEDGER=ledger())
    assert ended.code == 0, ended.text
    assert (ended.records[SMOKE[0]].status, ended.records[SMOKE[0]].ledger) == (Status.KNOWN, "stubborn")
    assert "stubborn: 1 pair · STUB · https://example.invalid/1" in ended.text


def test_a_fault_that_stopped_failing_ends_with_1(tmp_path: Path, ledger: Callable[..., str]) -> None:
    ended = pytest_run(tmp_path, "-n0", *some(2), STUB_LEDGER=ledger())
    assert ended.code == 1
    assert "ledger entry 'stubborn' expects MISMATCH, but it ended PASS" in ended.text


def test_a_fault_that_fails_differently_ends_with_1(tmp_path: Path, ledger: Callable[..., str]) -> None:
    ended = pytest_run(tmp_path, "-n0", *some(2), STUB_FAIL="0", STUB_LEDGER=ledger(outcome="RUN_ERROR"))
    assert ended.code == 1
    assert "expects RUN_ERROR STUB*, but it ended MISMATCH STUB" in ended.text


def test_an_entry_that_matches_no_pair_ends_with_1(tmp_path: Path, ledger: Callable[..., str]) -> None:
    ended = pytest_run(tmp_path, "-n2", STUB_LEDGER=ledger(cases="int7-*"))
    assert ended.code == 1
    assert "ledger entry 'stubborn' matches no pair of level smoke" in ended.text


@pytest.mark.parametrize(
    "narrowed", [some(2), ["-k", "relu2_no_mul"], ["--entry=layer"], [f"harness/suite/test_forward.py::test_pair[{SMOKE[0]}]"]]
)
def test_a_run_of_less_than_a_level_says_nothing_about_entries_that_match_nothing(
    tmp_path: Path, ledger: Callable[..., str], narrowed: list[str]
) -> None:
    where = ["harness/suite"] * ("::" not in narrowed[-1])
    ended = pytest_run(tmp_path, "-n0", *narrowed, STUB_LEDGER=ledger(cases="int7-*"), where=where)
    assert ended.code == 0, ended.text
    assert "matches no pair" not in ended.text


def test_entries_of_a_larger_level_than_the_one_that_is_run_are_not_judged(tmp_path: Path, ledger: Callable[..., str]) -> None:
    ended = pytest_run(tmp_path, "-n2", STUB_LEDGER=ledger(ISSUE + 'level = "nightly"\n', cases="int7-*"))
    assert ended.code == 0, ended.text


def test_a_malformed_ledger_is_one_sentence_with_file_and_line_and_2(tmp_path: Path, ledger: Callable[..., str]) -> None:
    ended = pytest_run(tmp_path, "-n2", STUB_LEDGER=ledger(ISSUE + "colour = 'red'\n"))
    assert ended.code == 2
    assert f"{tmp_path / 'issues.toml'}:2: unknown key 'colour'" in ended.text + ended.errors
    assert "Traceback" not in ended.text + ended.errors


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_subject_that_cannot_be_driven_ends_the_run_with_one_sentence(tmp_path: Path, workers: str) -> None:
    ended = pytest_run(tmp_path, workers, STUB_UNAVAILABLE="1")
    assert ended.code == 2
    assert ended.errors == "moediff: the stub was told to be unavailable: unset STUB_UNAVAILABLE\n"
    assert ended.text.count("told to be unavailable") == 1
    assert "During handling" not in ended.text
    assert "Traceback" not in ended.text + ended.errors
    assert not ended.records


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--backend=abacus", "unknown backend 'abacus'; the backends are interpreter"),
        ("--level=all", "unknown level 'all'; the levels are smoke, nightly, deep"),
        ("--entry=back", "unknown entry 'back'; the entries are layer"),
        ("--case=int8", "'int8' is not a case"),
        ("--subject=rust", "unknown subject 'rust'; say vllm, fake or fake:FAULT"),
        ("--subject=fake:RUST", "unknown fault 'RUST'; the faults are ZERO_OUTPUT"),
    ],
)
@pytest.mark.parametrize("workers", ["-n0", "-nauto"])
def test_a_wrong_option_is_one_sentence_and_2(tmp_path: Path, argument: str, sentence: str, workers: str) -> None:
    ended = pytest_run(tmp_path, workers, argument)
    assert ended.code == 2
    assert (ended.text + ended.errors).count(sentence) == 1
    assert "Traceback" not in ended.text + ended.errors


def test_a_negative_number_of_workers_is_one_sentence_and_2(tmp_path: Path) -> None:
    ended = pytest_run(tmp_path, "-n-1")
    assert ended.code == 2
    assert "-n takes a number of worker processes or auto, not -1" in ended.text + ended.errors


def test_k_selects_by_id(tmp_path: Path) -> None:
    ended = pytest_run(tmp_path, "-n0", "-k", "relu2_no_mul and layer")
    assert sorted(ended.records) == sorted(pair for pair in SMOKE if "relu2_no_mul" in pair and "layer" in pair)


def test_the_controller_imports_neither_torch_nor_vllm(tmp_path: Path) -> None:
    ended = pytest_run(tmp_path, "-n1", *some(1), STUB_TELL="1")
    told = re.findall(r"^controller imported: (.*)$", ended.errors, re.MULTILINE)
    assert told == ["nothing heavy"], ended.errors


def test_workers_take_stretches_and_a_machine_without_a_gpu_says_which_lane_it_takes(tmp_path: Path) -> None:
    ended = pytest_run(tmp_path, "-nauto", "-v", *some(2), CUDA_VISIBLE_DEVICES="")
    assert "scheduling tests via WorkStealingScheduling" in ended.text
    assert "moediff: backend interpreter, because no GPU is visible and no --backend was given" in ended.text
    assert {record.backend for record in ended.records.values()} == {"interpreter"}
