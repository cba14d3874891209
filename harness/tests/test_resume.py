"""A run that was ended is continued: what has a record is left out, what it was at is run again."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cases.case import Entry, Level
from harness.backends import Backend
from harness.exits import Misuse
from harness.pairs import Pair, select
from harness.suite import gather, order
from harness.suite.options import Options, parse_run
from harness.tests.test_run import pytest_run
from harness.verdict import Outcome, Verdict
from reports.records import Record, Recorder, Start, Status, merge, read, read_worker, worker_file

FUSED = [pair for pair in select(Level.SMOKE) if pair.entry is Entry.FUSED_EXPERTS]
PASSED = Verdict(outcome=Outcome.PASS, claim="inside the bound", margin=0.25)


def _start(pair: Pair, worker: str) -> Start:
    return Start(case=pair.case.id, entry=pair.entry, backend="triton", fields={}, environment={}, worker=worker)


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


def _options(directory: Path, backend: Backend = Backend.TRITON) -> Options:
    return cast("Options", SimpleNamespace(resume=directory, backend=backend))


def test_what_was_finished_is_known_and_what_was_not_is_taken_out(ended: Path) -> None:
    assert gather.recorded(_options(ended)) == {FUSED[0].id, FUSED[1].id, FUSED[3].id}
    assert [read_worker(worker_file(ended, worker)).died_at for worker in ("gw0", "gw1")] == [None, None]
    again = Recorder(ended, "gw1")  # appends behind what is whole
    again.finished(Record.of(_start(FUSED[4], "gw1"), verdict=PASSED, status=Status.CLEAN))
    again.close()
    assert sorted(record.pair for record in merge(ended)) == sorted({FUSED[i].id for i in (0, 1, 3, 4)})


def test_a_run_of_another_backend_or_none_at_all_is_misuse(ended: Path, tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="was on backend 'triton', not 'marlin': say --backend triton"):
        gather.recorded(_options(ended, Backend.MARLIN))
    with pytest.raises(Misuse, match="holds no records of a run; --resume takes a directory that a run made"):
        parse_run(str(tmp_path / "none"))
    assert gather.recorded(cast("Options", SimpleNamespace(resume=None))) == frozenset()


def test_a_run_goes_on_in_its_directory_and_says_what_all_of_it_found(tmp_path: Path) -> None:
    first = [f"--case={pair.case.id}" for pair in FUSED[:2]]
    more = [f"--case={pair.case.id}" for pair in FUSED[:4]]
    assert pytest_run(tmp_path, *first, "--entry=fused_experts", "-n1", STUB_FAIL="0").code == 1
    (directory,) = tmp_path.iterdir()
    before = read(directory / "records.jsonl")
    ended = pytest_run(tmp_path, *more, "--entry=fused_experts", "-n1", f"--resume={directory}")
    assert [directory] == list(tmp_path.iterdir())
    assert sorted(ended.records) == sorted(pair.id for pair in FUSED[:4])
    assert all(ended.records[record.pair] == record for record in before)
    assert ended.code == 1  # what was new before is still new
    nothing_left = pytest_run(tmp_path, *more, "--entry=fused_experts", "-n1", f"--resume={directory}")
    assert (nothing_left.code, nothing_left.records) == (ended.code, ended.records)


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
