"""What was new in a run is judged again from the outputs that were kept."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from cases.batch import make_batch
from cases.case import Entry, MoECase
from cases.checkpoint import make_checkpoint
from harness import ledger, rejudge
from harness.backends import Backend
from harness.suite import outputs
from harness.suite.subjects import open_subject
from harness.verdict import Outcome, Verdict
from reports.records import Record, Recorder, Start, Status, merge

CASE = MoECase.from_id("e4m3fn-tensor-static-quark-silu-bf16-e4k2m8h128i64-balanced")
OTHER = MoECase.from_id("e4m3fn-tensor-static-quark-silu-bf16-e4k2m8h128i128-balanced")
NEW = Verdict(outcome=Outcome.MISMATCH, claim="as the bound of that day had it", signature="UNEXPLAINED")


def _record(case: MoECase, relation: str = "", kind: str = "pair") -> Record:
    start = Start(
        case=case.id,
        entry="layer",
        backend="triton",
        fields=asdict(case),
        environment={"vllm": "0.33.0"},
        worker="gw0",
        relation=relation,
        kind=kind,
    )
    return Record.of(start, verdict=NEW, status=Status.NEW, news="something new")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two pairs and a relation of one, all new; the outputs of the pairs, one honest, one not."""
    directory = tmp_path / "run"
    recorder = Recorder(directory, "gw0")
    subject = open_subject("fake", Backend.TRITON)
    for record, case, wrong in ((_record(CASE), CASE, 0.0), (_record(OTHER), OTHER, 1.0)):
        recorder.finished(record)
        output = subject.run(subject.load(case, Entry.LAYER, make_checkpoint(case)), make_batch(case)).output
        output[3, 5] += wrong
        outputs.keep(directory, record, output)
    recorder.finished(replace(_record(CASE, "repeated_runs", "device check")))
    recorder.close()
    return directory


def test_an_output_that_is_honest_today_is_clean_and_another_is_still_new(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    into = run.parent / "again"
    assert rejudge.main([str(run), str(into)]) == 1
    now = {record.pair: record for record in merge(into)}
    clean, still = now[f"{CASE.id}[layer]"], now[f"{OTHER.id}[layer]"]
    assert (clean.verdict.outcome, clean.status, clean.news) == (Outcome.PASS, Status.CLEAN, "")
    assert (still.verdict.outcome, still.status) == (Outcome.MISMATCH, Status.NEW)
    assert now[f"repeated_runs:{CASE.id}[layer]"].verdict == NEW
    said = capsys.readouterr().out
    assert f"{CASE.id}[layer]: MISMATCH new -> PASS clean" in said
    assert said.endswith("2 still new\n")


def test_that_two_runs_differed_is_not_judged_again(run: Path) -> None:
    differed = replace(_record(CASE), verdict=replace(NEW, outcome=Outcome.NONDETERMINISTIC))
    assert rejudge.again(differed, run, ledger.Ledger(issues=())).verdict == differed.verdict
    assert rejudge.again(_record(CASE), run, ledger.Ledger(issues=())).verdict.outcome is Outcome.PASS


def test_the_ledger_of_today_speaks_for_what_has_no_output(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = tmp_path / "ledger.toml"
    rest = 'outcome = "MISMATCH"\nsignature = "*"\nlink = "https://example.org/1"\nsince = "2026-11-30"\nnote = "Found since."\n'
    where = 'entry = "layer"\nbackends = ["triton"]\nvllm = ">=0.27"\n'
    named = {"since-a": f"repeated_runs:{CASE.id}", "since-b": OTHER.id}
    entry.write_text("".join(f'[[issue]]\nid = "{name}"\ncases = "{cases}"\n{where}{rest}' for name, cases in named.items()))
    monkeypatch.setattr(ledger, "LEDGER", entry)
    into = run.parent / "again"
    assert rejudge.main([str(run), str(into)]) == 0
    assert {record.ledger for record in merge(into)} == {"", "since-a", "since-b"}


def test_two_directories_and_the_second_not_yet_there(run: Path) -> None:
    assert rejudge.main([]) == rejudge.main([str(run), str(run)]) == rejudge.main([str(run.parent / "none"), "x"]) == 2


def test_large_outputs_and_very_many_are_not_kept(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = replace(_record(CASE), case="another")
    outputs.keep(run, record, torch.zeros(outputs.LARGEST + 1, dtype=torch.int8))
    assert not outputs.file_of(run, record.pair).exists()
    monkeypatch.setattr(outputs, "MOST", 2)
    outputs.keep(run, record, torch.zeros(4))
    assert not outputs.file_of(run, record.pair).exists()
