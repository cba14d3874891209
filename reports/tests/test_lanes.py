"""Lanes beside each other, from records that are made here."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.verdict import Outcome, Verdict
from reports.lanes import HEAD, faults, main, news, row, runs
from reports.records import MERGED, Record, Recorder, Start, Status

CASE = "e4m3fn-tensor-static-quark-silu-bf16-e4k2m8h128i64-balanced"


def _recorded(directory: Path, worker: str, gpu: str, *told: tuple[str, str, Outcome, Status, dict[str, float]]) -> Recorder:
    recorder = Recorder(directory, worker)
    recorder.opened("stub", 2.0)
    for relation, kind, outcome, status, seconds in told:
        start = Start(
            case=CASE,
            entry="layer",
            backend="marlin",
            fields={},
            environment={"CUDA_VISIBLE_DEVICES": gpu},
            worker=worker,
            relation=relation,
            kind=kind,
        )
        verdict = Verdict(outcome=outcome, claim="a claim", margin=0.5, signature="" if outcome is Outcome.PASS else "BIAS_DROPPED")
        ledger = "an-entry" if status is Status.KNOWN else ""
        recorder.started(start)
        recorder.finished(Record.of(start, verdict=verdict, status=status, seconds=seconds, ledger=ledger))
    return recorder


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    first = {"make": 1.0, "load": 2.0, "run": 8.0, "again": 3.0, "expect": 4.0}
    second = {"make": 1.0, "load": 1.0, "run": 2.0, "again": 2.5}
    whole = _recorded(
        tmp_path, "gw0", "0", ("", "pair", Outcome.PASS, Status.CLEAN, first), ("", "pair", Outcome.MISMATCH, Status.KNOWN, second)
    )
    check = {"check": 7.0}
    cut = _recorded(
        tmp_path,
        "gw1",
        "1",
        ("far_rows", "device check", Outcome.UNAVAILABLE, Status.CLEAN, check),
        ("repeated_runs", "device check", Outcome.NONDETERMINISTIC, Status.NEW, check),
    )
    cut.started(Start(case=CASE, entry="layer", backend="marlin", fields={}, environment={}, worker="gw1"))
    yield tmp_path
    whole.close()
    cut.close()


def test_a_run_is_a_row(run: Path) -> None:
    cells = dict(zip(HEAD, row(*runs([run])), strict=True))
    assert (cells["lane"], cells["pairs"], cells["other checks"]) == ("marlin", "3", "2")
    assert (cells["PASS"], cells["known upstream"], cells["unavailable"], cells["new"], cells["cut off"]) == ("1", "1", "1", "1", "1")
    assert cells["first runs over second: compilation"] == "5 s"  # 8 - 3; a second run that took longer counts for nothing
    assert (cells["load"], cells["second runs"], cells["reference"]) == ("3 s", "6 s", "6 s")
    assert cells["other checks, compilation in them"] == "14 s"
    assert (cells["workers"], cells["GPUs"]) == ("2", "2")


def test_what_is_new_cut_off_or_known_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = [
        f"- marlin: `{CASE}[layer]`: RUN_ERROR WORKER_ENDED@prepare",
        f"- marlin: `repeated_runs:{CASE}[layer]`: NONDETERMINISTIC BIAS_DROPPED",
    ]
    assert news(runs([run])) == new
    assert main([str(run)]) == 0
    printed = capsys.readouterr().out
    assert f"| `an-entry` | marlin 1 | MISMATCH | `{CASE}[layer]` |" in printed
    assert printed.endswith("\n".join(["New:", "", *new, ""]))


def test_a_check_that_is_known_keeps_its_name_and_a_fake_is_called_one(run: Path) -> None:
    (told,) = runs([run])
    check = replace(told.records[-1], relation="loaded", status=Status.KNOWN, ledger="a-check", environment={"subject": "fake with X"})
    assert f"| `a-check` | marlin (fake with X) 1 | NONDETERMINISTIC | `loaded:{CASE}[layer]` |" in faults([replace(told, records=[check])])
    assert row(replace(told, records=[check]))[0] == "marlin (fake with X)"
    assert row(replace(told, records=[replace(check, environment={"subject": "vllm 0.33.0 (cuda)"})]))[0] == "marlin"


def test_quartiles_of_two_margins_lie_between_them(run: Path) -> None:
    (told,) = runs([run])
    passed = next(record for record in told.records if record.verdict.outcome is Outcome.PASS)
    two = [replace(passed, verdict=replace(passed.verdict, margin=margin)) for margin in (0.25, 0.75)]
    assert dict(zip(HEAD, row(replace(told, records=two)), strict=True))["margins: quartiles"] == "0.38 0.50 0.62"


def test_runs_of_one_lane_are_told_apart_and_each_is_counted_once(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    above = tmp_path_factory.mktemp("above")
    for name in ("first", "second", "more/second"):
        shutil.copytree(run, above / name)
    rows = [dict(zip(HEAD, row(each), strict=True))["lane"] for each in runs([above / "first", above])]
    assert rows == ["marlin (first)", *(f"marlin ({above / name})" for name in ("more/second", "second"))]
    told = runs([above / "first", above / "second"])
    assert [line.split("|")[2].strip() for line in faults(told)] == ["marlin (first) 1, marlin (second) 1"]
    assert {line.partition(":")[0] for line in news(told)} == {"- marlin (first)", "- marlin (second)"}


def test_misuse_is_a_sentence_and_2_and_help_is_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in (None, ""):
        if content is not None:
            (tmp_path / MERGED).write_text(content)
        assert main([str(tmp_path)]) == 2
        assert capsys.readouterr().err.startswith(f"lanes: {tmp_path} holds no records; name the directory of a run")
    assert main([]) == 2
    assert capsys.readouterr().err == "lanes: the following arguments are required: DIRECTORY; see `python -m reports.lanes --help`\n"
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "Exit codes" in capsys.readouterr().out


def test_reading_leaves_a_run_as_it_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run.iterdir()}
    assert main([str(run)]) == 0
    assert {path: path.read_bytes() for path in run.iterdir()} == before
    nowhere = run / "nowhere"
    assert main([str(nowhere)]) == 2
    assert not nowhere.exists()
    assert capsys.readouterr().err.endswith("cannot be read (No such file or directory); name the directory of a run\n")
