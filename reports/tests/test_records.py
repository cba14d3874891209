from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from harness.verdict import FaultFit, Outcome, Verdict
from reports.records import Record, Recorder, RecordsUnreadable, Start, Status, broke, merge, read, read_run, read_worker, source

START = Start(
    case="int8-a", entry="layer", backend="interpreter", fields={"seed": 3, "bias": True}, environment={"vllm": "0.33.0"}, worker="gw0"
)


def made(case: str = "int8-a", **changes: object) -> Record:
    verdict = Verdict(
        outcome=Outcome.MISMATCH,
        claim="every element lies inside its interval",
        margin=float("inf"),
        worst={"index": [0, 1], "actual": float("nan")},
        fits=(FaultFit(fault="W_SCALE", experts=(1, 2), residual=0.01),),
        signature="W_SCALE@1,2",
    )
    start = dataclasses.replace(START, case=case)
    return Record.of(start, **{"verdict": verdict, "status": Status.KNOWN, "ledger": "int8", "seconds": {"load": 0.5}, **changes})


def test_a_record_comes_back_as_it_was_written() -> None:
    again = Record.from_json(made().to_json())
    nan = again.verdict.worst.pop("actual")
    assert nan != nan
    expected = made()
    expected.verdict.worst.pop("actual")
    assert again == expected
    assert "\n" not in made(news="two\nlines").to_json()


def test_every_field_of_a_record_is_written() -> None:
    assert set(made().to_json().split('"')) >= {field.name for field in dataclasses.fields(Record)}


@pytest.mark.parametrize("text", ["a\u2028b", "a\u0085b", "a\x0cb", "\ud800"], ids=["U+2028", "U+0085", "form feed", "lone surrogate"])
def test_any_text_stays_on_its_line_and_comes_back(text: str, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "gw0")
    recorder.started(START)
    recorder.finished(made(news=text))
    recorder.started(dataclasses.replace(START, case=text))
    recorder.close()
    merge(tmp_path)
    done, left = sorted(read(tmp_path / "records.jsonl"), key=lambda record: record.case == text)
    assert (done.news, left.case) == (text, text)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"environment": 3}, "'environment' is 3, not an object"),
        ({"environment": {"torch": "2.14.0", "vllm": None}}, "'vllm' in 'environment' is None, not a string"),
        ({"environment": {"gpus": ["NVIDIA H200"]}}, "'gpus' in 'environment' is ['NVIDIA H200'], not a string"),
        ({"seconds": {"load": "0.5"}}, "'load' in 'seconds' is '0.5', not a number"),
        ({"fields": "x"}, "'fields' is 'x', not an object"),
        ({"ran": []}, "'ran' is [], not an object"),
        ({"case": 3}, "'case' is 3, not a string"),
        ({"peak_rss_bytes": "x"}, "'peak_rss_bytes' is 'x', not a number"),
    ],
)
def test_a_field_of_another_type_is_not_a_record(change: dict[str, object], says: str, tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text(json.dumps(json.loads(made().to_json()) | change) + "\n")
    with pytest.raises(RecordsUnreadable, match=re.escape(f"records.jsonl:1: not a record ({says})")):
        read(tmp_path / "records.jsonl")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"signature": None}, "'signature' is None, not a string"),
        ({"margin": "NaN"}, "'margin' is 'NaN', not a number"),
        ({"gains": []}, "'gains' is [], not an object"),
        ({"fits": [{"fault": "A", "experts": [1], "residual": "0"}]}, "'residual' is '0', not a number"),
        ({"fits": [{"fault": None, "experts": [1], "residual": 0.5}]}, "'fault' is None, not a string"),
        ({"worst": {"index": [1], "actual": 2.0}}, "'worst' is {'index': [1], 'actual': 2.0}, not an element with its index and value"),
        ({"worst": {"index": [1, 2], "actual": None}}, "'worst' is {'index': [1, 2], 'actual': None}, not an element"),
    ],
)
def test_a_verdict_of_other_types_is_not_a_record(change: dict[str, object], says: str, tmp_path: Path) -> None:
    data = json.loads(made().to_json())
    (tmp_path / "records.jsonl").write_text(json.dumps(data | {"verdict": data["verdict"] | change}) + "\n")
    with pytest.raises(RecordsUnreadable, match=re.escape(f"records.jsonl:1: not a record ({says}")):
        read(tmp_path / "records.jsonl")


def test_a_pair_that_was_begun_with_other_types_is_not_a_record(tmp_path: Path) -> None:
    """A worker that was killed leaves no more of it than this."""
    started = dataclasses.asdict(START) | {"environment": {"vllm": 33}}
    (tmp_path / "worker-gw0.jsonl").write_text(json.dumps({"started": started}) + "\n")
    with pytest.raises(
        RecordsUnreadable, match=re.escape("worker-gw0.jsonl:1: not a record ('vllm' in 'environment' is 33, not a string)")
    ):
        read_run(tmp_path)


def test_bytes_that_are_no_text_are_told_by_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_bytes(made().to_json().encode() + b"\n\xff\xfe\n")
    with pytest.raises(RecordsUnreadable, match=r"records\.jsonl:2: not UTF-8 text"):
        read(tmp_path / "records.jsonl")


def test_an_unknown_field_is_not_passed_over() -> None:
    with pytest.raises(ValueError, match="colour"):
        Record.from_json(made().to_json().replace('"ledger"', '"colour"'))


def test_a_finished_record_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "gw0")
    recorder.started(START)
    recorder.finished(made())
    assert len(read_worker(tmp_path / "worker-gw0.jsonl").records) == 1
    recorder.close()


def test_a_worker_that_died_loses_no_finished_record_and_its_pair_is_named(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "gw0")
    recorder.opened("stub", 1.5)
    recorder.started(START)
    recorder.finished(made())
    recorder.started(dataclasses.replace(START, case="int8-b"))
    recorder.stage("load")
    recorder.stage("run")
    recorder.close()
    path = tmp_path / "worker-gw0.jsonl"
    path.write_text(path.read_text() + '{"finished": {"case": "int8-b", "ver')

    first, second = merge(tmp_path)
    assert first == made() or first.verdict.margin == float("inf")
    assert (second.case, second.verdict.outcome, second.status) == ("int8-b", Outcome.RUN_ERROR, Status.NEW)
    assert "'run'" in second.news
    assert second.fields == START.fields
    assert [record.pair for record in read(tmp_path / "records.jsonl")] == ["int8-a[layer]", "int8-b[layer]"]
    assert read_worker(path).open_seconds == 1.5


def test_of_an_interrupted_run_only_crashed_workers_leave_a_pair_behind(tmp_path: Path) -> None:
    for worker in "gw0", "gw1":
        recorder = Recorder(tmp_path, worker)
        recorder.started(dataclasses.replace(START, worker=worker, case=worker))
        recorder.close()
    assert [record.case for record in merge(tmp_path)] == ["gw0", "gw1"]
    assert [record.case for record in merge(tmp_path, {"gw1"})] == ["gw1"]
    assert merge(tmp_path, set()) == []


def test_a_damaged_line_in_the_middle_is_an_error_that_names_file_and_line(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "gw0")
    recorder.started(START)
    recorder.close()
    path = tmp_path / "worker-gw0.jsonl"
    path.write_text(path.read_text() + "not json\n")
    with pytest.raises(RecordsUnreadable, match=r"worker-gw0\.jsonl:2"):
        merge(tmp_path)
    (tmp_path / "records.jsonl").write_text(made().to_json() + "\n{}\n")
    with pytest.raises(RecordsUnreadable, match=r"records\.jsonl:2"):
        read(tmp_path / "records.jsonl")


def test_workers_are_merged_in_order_of_pairs_whoever_ran_them(tmp_path: Path) -> None:
    for worker, case in (("gw1", "a"), ("gw0", "b")):
        recorder = Recorder(tmp_path, worker)
        recorder.started(dataclasses.replace(START, case=case))
        recorder.finished(made(case))
        recorder.close()
    assert [record.case for record in merge(tmp_path)] == ["a", "b"]


def test_a_harness_that_raises_is_not_taken_for_a_subject_that_fails() -> None:
    record = broke(START, "compare", "RuntimeError: no")
    assert record.status is Status.NEW
    assert "harness itself" in record.verdict.claim
    assert record.verdict.signature == "HARNESS_RAISED@compare"


def test_what_workers_finished_after_the_merge_is_read(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "gw0")
    recorder.finished(made("a"))
    merge(tmp_path, set())
    recorder.started(dataclasses.replace(START, case="b"))
    assert [record.case for record in read_run(tmp_path)] == ["a"]  # as after Ctrl-C
    recorder.finished(made("b"))
    recorder.started(dataclasses.replace(START, case="c"))
    recorder.close()
    assert source(tmp_path) == tmp_path
    assert [record.case for record in read_run(tmp_path)] == ["a", "b", "c"]
    merge(tmp_path)
    assert source(tmp_path) == tmp_path / "records.jsonl"


def test_what_was_asked_again_does_not_make_a_merged_file_old(tmp_path: Path) -> None:
    lost = Verdict(outcome=Outcome.RUN_ERROR, claim="it runs", signature="OUT_OF_MEMORY@run")
    recorder = Recorder(tmp_path, "gw0")
    recorder.finished(made("a", verdict=lost))
    recorder.finished(made("a"))
    merge(tmp_path)
    assert source(tmp_path) == tmp_path / "records.jsonl"
    recorder.finished(made("b", verdict=lost))
    recorder.close()
    assert source(tmp_path) == tmp_path
