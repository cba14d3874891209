from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.verdict import UNREASONED, Outcome, Verdict
from reports.matrix import FILE, LOAD, State, cells, render, state, write
from reports.records import Record, Status

FP8: dict[str, object] = {
    "weight": "e4m3fn",
    "weight_scale": "channel",
    "act_scale": "dyntoken",
    "checkpoint": "ct",
    "origin": "prequantized",
    "activation": "silu",
}
ONLINE: dict[str, object] = FP8 | {"checkpoint": "plain", "origin": "online"}
PLAIN: dict[str, object] = FP8 | {
    "weight": "bf16",
    "weight_scale": "none",
    "act_scale": "none",
    "checkpoint": "plain",
    "origin": "unquantized",
}
REFUSED = "ValueError: FP8 MoE backend X does not support QuantKey(f8e4m3fn,scale(f32),symmetric)xQuantKey(f8,scale(f32),symmetric).\nmore"


def record(fields: dict[str, object], backend: str = "humming", outcome: Outcome = Outcome.PASS, **rest: object) -> Record:
    given: dict[str, object] = {
        "verdict": Verdict(outcome=outcome, claim="what was claimed", detail=REFUSED if outcome is Outcome.UNSUPPORTED else ""),
        "status": Status.CLEAN,
        "relation": LOAD,
        "environment": {"architecture": "sm90"},
    }
    return Record(case="a-case", entry="layer", backend=backend, fields=fields, worker="main", **(given | rest))  # type: ignore[arg-type]


LOADS = record(FP8)
PARTLY = record(FP8, "marlin", ran={"stops_at": "_C::gptq_marlin_repack"})
NO = record(FP8, "cutlass", Outcome.UNSUPPORTED)
BARE = record(
    FP8,
    "emulation",
    verdict=Verdict(
        outcome=Outcome.UNSUPPORTED, claim="refused without a reason: groups only", detail="AssertionError: ", signature=UNREASONED
    ),
)
FAULT = record(FP8, "humming-a8", Outcome.LOAD_ERROR, status=Status.KNOWN, ledger="humming-entry")
NEW = record(FP8, "triton", Outcome.LOAD_ERROR, status=Status.NEW, news="LOAD_ERROR and no entry knows it\nmore")
RAN = record(FP8, "interpreter", relation="", environment={}, ran={"experts_class": "TritonExperts"})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (LOADS, State.LOADS),
        (PARTLY, State.PARTLY),
        (NO, State.REFUSED),
        (BARE, State.BARE),
        (FAULT, State.FAULT),
        (NEW, State.NEW),
        (RAN, State.RAN),
    ],
)
def test_every_state(given: Record, expected: State) -> None:
    assert state(given) is expected


def test_a_cell_counts_and_says_why() -> None:
    (cell,) = cells([LOADS, LOADS, replace(NO, backend="humming")])
    assert (cell.states, cell.worst) == ({State.LOADS: 2, State.REFUSED: 1}, State.LOADS)
    assert cell.reasons == (REFUSED,)
    assert cell.cases == ("load:a-case[layer]",) * 3


def test_formats_origins_backends_and_architectures_are_apart() -> None:
    elsewhere = replace(LOADS, environment={"architecture": "sm100"})
    assert len(cells([LOADS, elsewhere, record(ONLINE), record(PLAIN), NO, RAN])) == 6
    assert {cell.architecture for cell in cells([LOADS, elsewhere, RAN, replace(RAN, environment={"gpus": "H200"})])} == {
        "sm90",
        "sm100",
        "cpu",
        "H200",
    }


def test_relations_and_questions_have_tables_of_their_own() -> None:
    relation, question = replace(RAN, relation="down_scale", kind="exact relation"), replace(RAN, relation="loaded", kind="loading check")
    assert [(cell.kind, cell.states) for cell in cells([RAN, relation, relation, question])] == [
        ("pair", {State.RAN: 1}),
        ("exact relation", {State.RAN: 2}),
        ("loading check", {State.RAN: 1}),
    ]
    text = render(cells([relation]))
    assert "cpu: format × origin × backend, exact relations" in text
    assert "backend, pairs" not in text


def test_reasons_are_numbered_once_and_shortened() -> None:
    text = render(cells([NO, replace(NO, fields=ONLINE), LOADS, replace(LOADS, backend="cutlass", fields=PLAIN), PARTLY, FAULT, NEW]))
    assert text.count("no [") == 2
    assert text.count("does not support …x….") == 1
    for expected in (
        "sm90",
        "e4m3fn channel x dyntoken, online",
        "unquantized",
        "as far as _C::gptq_marlin_repack",
        "humming-entry: ",
        "what was claimed",
    ):
        assert expected in text


def test_a_refusal_without_a_reason_is_told_apart() -> None:
    text = render(cells([replace(BARE, backend="humming", fields=ONLINE), LOADS, NO]))
    assert "no! [" in text
    assert "refused without a reason: groups only; AssertionError:" in text


def test_gated_or_not_is_one_row_where_nothing_differs() -> None:
    other = FP8 | {"activation": "relu2_no_mul"}
    assert "ct, gated or not" in render(cells([LOADS, record(other)]))
    apart = render(cells([LOADS, record(other, "humming", Outcome.LOAD_ERROR, status=Status.NEW)]))
    assert "ct, not gated" in apart
    assert "gated or not" not in apart


def test_a_backend_that_is_always_refused_is_a_line() -> None:
    text = render(cells([LOADS, NO, replace(NO, fields=PLAIN)]))
    assert "cutlass is refused throughout, most often: ValueError" in text
    assert "no [" not in text


def test_a_backend_that_runs_only_what_no_backend_decides_is_a_column() -> None:
    assert "ran" in render(cells([replace(RAN, ran={"experts_class": "fused_experts"})]))


def test_the_file_holds_every_cell(tmp_path: Path) -> None:
    found = cells([LOADS, NO])
    assert write(tmp_path, found) == tmp_path / FILE
    told = json.loads((tmp_path / FILE).read_text())
    assert [(each["way"], each["backend"], each["architecture"], each["states"]) for each in told] == [
        ("e4m3fn channel x dyntoken, ct", "humming", "sm90", {"loads": 1}),
        ("e4m3fn channel x dyntoken, ct", "cutlass", "sm90", {"no": 1}),
    ]
    assert told[1]["reasons"] == [REFUSED]
