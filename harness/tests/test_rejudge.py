"""What was new in a run is judged again from the outputs that were kept."""

from __future__ import annotations

import errno
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from cases.batch import make_batch
from cases.case import Entry, MoECase
from cases.checkpoint import make_checkpoint
from harness import ledger, rejudge
from harness.backends import Backend
from harness.ledger import Ledger
from harness.suite import outputs
from harness.suite.subjects import open_subject
from harness.verdict import Outcome, Verdict
from reports.records import MERGED, Record, Recorder, RecordsUnwritable, Start, Status, merge, read, read_run

CASE = MoECase.from_id("e4m3fn-tensor-static-quark-silu-bf16-e4k2m8h128i64-balanced")
OTHER = MoECase.from_id("e4m3fn-tensor-static-quark-silu-bf16-e4k2m8h128i128-balanced")
NEW = Verdict(outcome=Outcome.MISMATCH, claim="as the bound of that day had it", signature="UNEXPLAINED")


def _start(case: MoECase, relation: str = "", kind: str = "pair") -> Start:
    return Start(
        case=case.id,
        entry="layer",
        backend="triton",
        fields=asdict(case),
        environment={"vllm": "0.33.0"},
        worker="gw0",
        relation=relation,
        kind=kind,
    )


def _record(case: MoECase, relation: str = "", kind: str = "pair") -> Record:
    return Record.of(_start(case, relation, kind), verdict=NEW, status=Status.NEW, news="something new")


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
    now = {record.pair: record for record in read(into / MERGED)}
    assert OTHER.id in (into / "index.html").read_text()
    clean, still = now[f"{CASE.id}[layer]"], now[f"{OTHER.id}[layer]"]
    assert (clean.verdict.outcome, clean.status, clean.news) == (Outcome.PASS, Status.CLEAN, "")
    assert (still.verdict.outcome, still.status) == (Outcome.MISMATCH, Status.NEW)
    assert now[f"repeated_runs:{CASE.id}[layer]"].verdict == NEW
    said = capsys.readouterr().out
    assert f"{CASE.id}[layer]: MISMATCH new -> PASS clean" in said
    assert said.endswith(f"{len(now)} records stand in {into} as of today: 2 still new\n")


def test_what_was_cut_off_stays_so_and_is_new(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for worker, stage in (("gw1", "load"), ("gw2", "run")):
        recorder = Recorder(run, worker)
        recorder.finished(replace(_record(CASE, f"of {worker}"), status=Status.CLEAN, verdict=replace(NEW, outcome=Outcome.PASS)))
        recorder.started(left := replace(_start(CASE, f"left by {worker}"), worker="gw1"))
        recorder.stage(stage)
        recorder.close()
    into = run.parent / "again"
    assert rejudge.main([str(run), str(into)]) == 1
    before, after = ([record for record in read_run(where) if "left" in record.relation] for where in (run, into))
    assert len(before) == 2
    assert before == after == [record for record in merge(into) if "left" in record.relation]
    said = capsys.readouterr().out
    assert f"{left.pair}: still RUN_ERROR new WORKER_ENDED@run\n" in said
    assert said.endswith("4 still new\n")


def test_what_is_not_kept_of_this_record_is_of_another_attempt(run: Path) -> None:
    passed = replace(_record(OTHER), verdict=replace(NEW, outcome=Outcome.PASS), status=Status.CLEAN)
    assert rejudge.again(passed, run, Ledger(issues=())).verdict.outcome is Outcome.PASS
    assert outputs.file_of(run, passed.pair).exists()
    outputs.forget(run, passed.pair)
    outputs.forget(run, passed.pair)
    assert not outputs.file_of(run, passed.pair).exists()


@pytest.mark.parametrize(
    ("outcome", "signature"),
    [
        (Outcome.NONDETERMINISTIC, "NONDETERMINISTIC"),
        (Outcome.RUN_ERROR, "WRONG_CLASS:OtherExperts"),
        (Outcome.RUN_ERROR, "NOT_REFUSED"),
        (Outcome.RUN_ERROR, "RuntimeError: in the second run"),
        (Outcome.LOAD_ERROR, "KeyError: 'w1'"),
    ],
)
def test_a_verdict_on_more_than_the_output_is_not_judged_again(run: Path, outcome: Outcome, signature: str) -> None:
    told = replace(_record(CASE), verdict=replace(NEW, outcome=outcome, signature=signature))
    now = rejudge.again(told, run, ledger.Ledger(issues=()))
    assert (now.verdict, now.status) == (told.verdict, Status.NEW)
    assert rejudge.again(_record(CASE), run, ledger.Ledger(issues=())).verdict.outcome is Outcome.PASS


@pytest.mark.parametrize(("relation", "kind"), [("", "pair"), ("loaded", "loading check")])
def test_words_that_are_declared_by_now_are_a_refusal(run: Path, relation: str, kind: str) -> None:
    declined = MoECase.from_id("e4m3fn-channel-static-quark-silu-bf16-e4k2m8h128i64-balanced")
    said = "ValueError: only per-tensor, per-channel and per-block scales are supported"
    raised = replace(NEW, outcome=Outcome.LOAD_ERROR, detail=said, signature=said)
    told = replace(_record(declined, relation, kind), verdict=raised)
    now = rejudge.again(told, run, Ledger(issues=()))
    assert (now.verdict.outcome, now.status) == (Outcome.UNSUPPORTED, Status.CLEAN)
    assert now.verdict.detail == raised.detail
    for signature, detail in (
        ("ValueError: something else", "ValueError: something else"),
        ("HARNESS_RAISED@run", said),
        ("CUDA_CONTEXT_LOST@run", said),
        ("OUT_OF_MEMORY@load", said),
    ):
        other = replace(told, verdict=replace(raised, signature=signature, detail=detail))
        assert rejudge.again(other, run, Ledger(issues=())).status is Status.NEW


def test_a_mismatch_of_another_run_than_the_one_kept_stands(run: Path) -> None:
    kept = torch.load(outputs.file_of(run, _record(CASE).pair))["outputs"][_record(CASE).pair]
    for actual, outcome in ((float(kept[1, 2]), Outcome.PASS), (float(kept[1, 2]) + 1.0, Outcome.MISMATCH)):
        told = replace(_record(CASE), verdict=replace(NEW, worst={"index": [1, 2], "actual": actual}))
        assert rejudge.again(told, run, ledger.Ledger(issues=())).verdict.outcome is outcome


def test_what_ran_by_another_recipe_than_here_stands(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for ran, outcome in (("triton-modular", Outcome.PASS), ("triton-modular+ue8m0", Outcome.MISMATCH)):
        told = replace(_record(CASE), ran={"recipe": ran})
        assert rejudge.again(told, run, ledger.Ledger(issues=())).verdict.outcome is outcome
    assert "ran as triton-modular+ue8m0, which is triton-modular with what is installed here" in capsys.readouterr().out


def test_what_was_only_loaded_is_judged_as_loading_and_a_fake_by_no_ledger(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []

    def judged_by(known: ledger.Ledger, *_: object, loads_only: bool, **__: object) -> ledger.Judged:
        seen.append((loads_only, bool(known.issues)))
        return ledger.Judged(standing=ledger.Standing.CLEAN)

    monkeypatch.setattr(rejudge, "judged_by", judged_by)
    known = ledger.load(ledger.LEDGER)
    for environment in (
        {"subject": "vllm 0.33.0 (cuda)"},
        {"subject": "vllm 0.33.0 (interpreter)", "architecture": "sm90"},
        {"subject": "fake"},
    ):
        rejudge.again(replace(_record(CASE, "repeated_runs", "device check"), environment=environment), run, known)
    assert seen == [(False, True), (True, True), (False, False)]


@pytest.mark.parametrize("broken", ["truncated", "empty", "no pair", "no output", "no tensor"])
def test_an_output_that_cannot_be_read_is_one_sentence_and_2(run: Path, capsys: pytest.CaptureFixture[str], broken: str) -> None:
    file, pair = outputs.file_of(run, _record(CASE).pair), _record(CASE).pair
    if broken in ("truncated", "empty"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 if broken == "truncated" else 0])
    else:
        torch.save({"no pair": {"outputs": {}}, "no output": [1], "no tensor": {"outputs": {pair: 3}}}[broken], file)
    assert rejudge.main([str(run), str(run.parent / "again")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"rejudge: {file} ")
    assert not (run.parent / "again").exists()
    assert said.endswith("without that file the verdict stands as it was recorded\n")


def test_a_place_that_cannot_be_written_and_records_that_cannot_be_read_are_one_sentence_and_2(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rejudge.main([str(run), str(Path(__file__) / "into")]) == 2
    assert "test_rejudge.py/into cannot be read or written (Not a directory); name another directory\n" in capsys.readouterr().err
    (run / "worker-zz.jsonl").write_text("a log\n")
    assert rejudge.main([str(run), str(run.parent / "again")]) == 2
    assert "worker-zz.jsonl:1: not a record" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ([], "required: RUN, INTO"),
        (["run"], "required: INTO"),
        (["run", "into", "more"], "unrecognized arguments: more"),
        (["run", "run"], "run exists; name a directory that does not exist yet"),
        (["none", "into"], "none holds no records of a run"),
    ],
)
def test_two_directories_and_the_second_not_yet_there(
    run: Path, typed: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parent)
    assert rejudge.main(typed) == 2
    said = capsys.readouterr().err
    assert said.startswith("rejudge: ")
    assert sentence in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("field", ["case", "entry", "backend"])
def test_a_record_of_what_is_unknown_here_is_one_sentence_and_2(run: Path, field: str, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(run, "gw1")
    recorder.finished(replace(_record(CASE), **{field: "nothing"}))  # type: ignore[arg-type]
    recorder.close()
    assert rejudge.main([str(run), str(run.parent / "again")]) == 2
    said = capsys.readouterr().err
    assert "'nothing'" in said
    assert said.count("\n") == 1


def test_help_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        rejudge.main(["--help"])
    assert ended.value.code == 0
    assert "Exit codes" in capsys.readouterr().out


def test_large_outputs_and_very_many_are_not_kept(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = replace(_record(CASE), case="another")
    outputs.keep(run, record, torch.zeros(outputs.LARGEST + 1, dtype=torch.int8))
    assert not outputs.file_of(run, record.pair).exists()
    monkeypatch.setattr(outputs, "MOST", 2)
    outputs.keep(run, record, torch.zeros(4))
    assert not outputs.file_of(run, record.pair).exists()


def test_an_output_that_cannot_be_written_is_the_run_s_misuse_and_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs.directory(tmp_path).write_text("in the way")
    with pytest.raises(RecordsUnwritable):
        outputs.keep(tmp_path, _record(CASE), torch.zeros(4))
    outputs.directory(tmp_path).unlink()

    def full(path: Path, data: memoryview) -> int:
        with path.open("wb") as file:
            file.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RecordsUnwritable):
        outputs.keep(tmp_path, _record(CASE), torch.zeros(4))
    assert not list(outputs.directory(tmp_path).iterdir())


def test_kept_is_what_is_new_or_a_known_mismatch() -> None:
    new = _record(CASE)
    assert outputs.wanted(new)
    known = replace(new, status=Status.KNOWN)
    assert outputs.wanted(replace(known, verdict=replace(NEW, outcome=Outcome.MISMATCH)))
    assert not outputs.wanted(replace(known, verdict=replace(NEW, outcome=Outcome.RUN_ERROR)))
    assert not outputs.wanted(replace(_record(CASE, "repeated_runs", "device check"), verdict=replace(NEW, outcome=Outcome.MISMATCH)))
