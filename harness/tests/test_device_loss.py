"""A CUDA context that is lost, and memory that runs out: the run around a stub, and the words that tell one from the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import device_loss
from harness.tests.test_run import ISSUE, SMOKE, ledger, pytest_run, some
from harness.verdict import Outcome, Verdict
from reports.records import Status

ledger = ledger
LOST = "CUDA_CONTEXT_LOST@compare"


@pytest.mark.parametrize("how", ["STUB_LOSE", "STUB_LATE"])
def test_a_lost_context_ends_its_worker_after_the_record_and_every_other_pair_runs(tmp_path: Path, how: str) -> None:
    ended = pytest_run(tmp_path, "-n2", *some(16), **{how: "2"})
    assert ended.code == 1
    assert set(SMOKE[:16]) <= set(ended.records)
    victim = ended.records.pop(SMOKE[2])
    assert (victim.verdict.outcome, victim.verdict.signature, victim.status) == (Outcome.RUN_ERROR, LOST, Status.NEW)
    assert "an illegal memory access" in victim.verdict.detail
    others = [ended.records[pair] for pair in SMOKE[:16] if pair != SMOKE[2]]
    assert all(record.verdict.outcome is Outcome.PASS for record in others)
    assert f"replacing crashed worker {victim.worker}" in ended.text
    assert "was lost" in ended.text.partition("FAILURES")[2]
    assert "crashed while running" not in ended.text


def test_a_lost_context_that_the_ledger_knows_fails_nothing(tmp_path: Path, ledger: Callable[..., str]) -> None:
    told = ledger(ISSUE.replace('"STUB*"', f'"{LOST}"'), outcome="RUN_ERROR")
    ended = pytest_run(tmp_path, "-n1", *some(4), STUB_LOSE="0", STUB_LEDGER=told)
    assert ended.code == 0, ended.text
    assert ended.records[SMOKE[0]].status is Status.KNOWN
    assert len(ended.records) >= 4


def test_without_workers_the_run_ends_with_one_sentence_after_the_record(tmp_path: Path) -> None:
    ended = pytest_run(tmp_path, "-n0", *some(4), STUB_LOSE="1")
    assert ended.code == 1
    assert ended.records[SMOKE[1]].verdict.signature == LOST
    assert len(ended.records) < 4
    assert f"moediff: the CUDA context of this process was lost at {SMOKE[1]}" in ended.errors
    assert "Traceback" not in ended.text + ended.errors


def test_out_of_memory_is_recorded_with_its_stage_and_the_worker_goes_on(tmp_path: Path) -> None:
    ended = pytest_run(tmp_path, "-n1", *some(4), STUB_MEMORY="1")
    assert ended.code == 1
    victim = ended.records.pop(SMOKE[1])
    assert (victim.verdict.outcome, victim.verdict.signature) == (Outcome.RUN_ERROR, "OUT_OF_MEMORY@compare")
    assert {record.verdict.outcome for record in ended.records.values()} == {Outcome.PASS}
    assert {record.worker for record in ended.records.values()} == {"gw0"}


def test_a_case_that_this_vllm_cannot_be_told_of_is_a_record_and_the_run_goes_on(tmp_path: Path) -> None:
    ended = pytest_run(tmp_path, "-n1", *some(4), STUB_UNDRIVEN="1")
    assert ended.code == 1
    told = ended.records.pop(SMOKE[1])
    assert (told.verdict.outcome, told.status) == (Outcome.UNAVAILABLE, Status.NEW)
    assert {record.verdict.outcome for record in ended.records.values()} == {Outcome.PASS}
    assert "takes no has_bias; leave out this case" in ended.text
    assert "Traceback" not in ended.text + ended.errors


@pytest.mark.parametrize(
    ("detail", "memory"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("AcceleratorError: CUDA error: out of memory", True),
        ("RuntimeError: Triton Error [CUDA]: out of memory", True),
        ("RuntimeError: CUDA_ERROR_OUT_OF_MEMORY", True),
        ("OutOfResources: out of resource: shared memory, Required: 1, Hardware limit: 0", False),
        ("AcceleratorError: CUDA error: an illegal memory access was encountered", False),
        ("ValueError: no kernel", False),
    ],
)
def test_whose_memory_ran_out(detail: str, memory: bool) -> None:
    assert device_loss.out_of_memory(detail) is memory


def test_an_error_of_vllm_on_a_device_that_works_stays_what_it_was() -> None:
    assert device_loss.verdict("AcceleratorError: CUDA error: invalid argument", "run", None) is None
    lost = device_loss.verdict("AcceleratorError: CUDA error: device-side assert triggered", "run", "AcceleratorError: again")
    assert lost is not None
    assert lost.signature == "CUDA_CONTEXT_LOST@run"


def test_a_refusal_by_any_text_does_not_hide_a_lost_device() -> None:
    assert device_loss.may_concern_device(Verdict(outcome=Outcome.UNSUPPORTED, claim="", detail="AcceleratorError: x"))
    assert not device_loss.may_concern_device(Verdict(outcome=Outcome.MISMATCH, claim=""))
