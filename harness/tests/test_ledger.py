from __future__ import annotations

from pathlib import Path

import pytest

from cases.bad_checkpoints import Bad
from cases.case import Entry, Level
from harness.backends import Backend
from harness.device_checks import DeviceCheck
from harness.ledger import Judged, Ledger, LedgerError, Standing, load, matches
from harness.load_oracles import Oracle
from harness.loading import Question
from harness.suite.gather import ids
from harness.verdict import Outcome, Verdict

ENTRY = """
[[issue]]
id = "a"
cases = "int8-*"
entry = "layer"
backends = ["interpreter"]
vllm = "<=0.33.0"
outcome = "MISMATCH"
signature = "W_SCALE_*"
link = "x"
since = "2026-11-30"
note = "n"
"""

PEAK = ENTRY.replace("W_SCALE_*", "PEAK:conversion").replace("MISMATCH", "NOT_IDENTICAL") + "peak = 2.5\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ledger.toml"
    path.write_text(text, encoding="utf-8")
    return path


def standing(ledger: Ledger, outcome: Outcome, signature: str = "", case: str = "int8-x", version: str = "0.33.0") -> Standing:
    verdict = Verdict(outcome=outcome, claim="c", signature=signature)
    return ledger.judge(verdict, case, Entry.LAYER, Backend.INTERPRETER, version).standing


def test_the_five_standings(tmp_path: Path) -> None:
    ledger = load(written(tmp_path, ENTRY))
    assert standing(ledger, Outcome.MISMATCH, "W_SCALE_FLAT_INDEX@1") is Standing.KNOWN
    assert standing(ledger, Outcome.PASS) is Standing.STOPPED_FAILING
    assert standing(ledger, Outcome.UNSUPPORTED) is Standing.CLEAN  # refused by design: the entry does not speak of it
    assert standing(ledger, Outcome.MISMATCH, "ZERO_OUTPUT@1") is Standing.FAILS_DIFFERENTLY
    assert standing(ledger, Outcome.RUN_ERROR, "W_SCALE_FLAT_INDEX") is Standing.FAILS_DIFFERENTLY
    assert standing(ledger, Outcome.MISMATCH, "W_SCALE_FLAT_INDEX@1", case="e4m3fn-x") is Standing.NEW
    assert standing(ledger, Outcome.PASS, case="e4m3fn-x") is Standing.CLEAN


def test_an_entry_may_have_several_patterns(tmp_path: Path) -> None:
    ledger = load(written(tmp_path, ENTRY.replace('"int8-*"', '["int8-*-bias", "*-onin"]')))
    assert standing(ledger, Outcome.PASS, case="int8-x-bias") is Standing.STOPPED_FAILING
    assert standing(ledger, Outcome.PASS, case="e4m3fn-x-onin") is Standing.STOPPED_FAILING
    assert standing(ledger, Outcome.PASS, case="int8-x") is Standing.CLEAN


def test_an_entry_may_have_several_signatures(tmp_path: Path) -> None:
    ledger = load(written(tmp_path, ENTRY.replace('"W_SCALE_*"', '["A@all", "B"]')))
    assert standing(ledger, Outcome.MISMATCH, "A@all") is Standing.KNOWN
    assert standing(ledger, Outcome.MISMATCH, "B") is Standing.KNOWN
    assert standing(ledger, Outcome.MISMATCH, "A@all+B") is Standing.FAILS_DIFFERENTLY
    said = ledger.judge(Verdict(outcome=Outcome.MISMATCH, claim="c", signature="C"), "int8-x", Entry.LAYER, Backend.INTERPRETER, "0.33.0")
    assert "expects MISMATCH A@all or B, but it ended MISMATCH C" in said.sentence


def test_a_peak_bounds_an_entry(tmp_path: Path) -> None:
    ledger = load(written(tmp_path, PEAK))

    def judged(margin: float | None) -> Judged:
        verdict = Verdict(outcome=Outcome.NOT_IDENTICAL, claim="c", signature="PEAK:conversion", margin=margin)
        return ledger.judge(verdict, "int8-x", Entry.LAYER, Backend.INTERPRETER, "0.33.0")

    assert [judged(margin).standing for margin in (1.1, 2.5, None)] == [Standing.KNOWN] * 3  # None: recorded before there were numbers
    assert judged(25.0).standing is Standing.FAILS_DIFFERENTLY
    assert judged(25.0).sentence == "ledger entry 'a' expects memory up to 2.5 times what is needed, but it took 25.00 times that"


def test_versions_bound_an_entry(tmp_path: Path) -> None:
    ledger = load(written(tmp_path, ENTRY))
    assert standing(ledger, Outcome.PASS, version="0.34.0") is Standing.CLEAN
    assert standing(ledger, Outcome.MISMATCH, "W_SCALE_FLAT_INDEX@1", version="0.34.0") is Standing.NEW
    assert standing(ledger, Outcome.PASS, version="0.33.0rc1") is Standing.STOPPED_FAILING
    assert standing(ledger, Outcome.PASS, version="some-checkout") is Standing.STOPPED_FAILING


def test_an_entry_that_matches_nothing_is_named(tmp_path: Path) -> None:
    ledger = load(written(tmp_path, ENTRY))
    assert [i.id for i in ledger.unmatched([("e4m3fn-x", Entry.LAYER)], Backend.INTERPRETER, "0.33.0")] == ["a"]
    assert [i.id for i in ledger.unmatched([("int8-x", Entry.FUSED_EXPERTS)], Backend.INTERPRETER, "0.33.0")] == ["a"]
    assert ledger.unmatched([("int8-x", Entry.LAYER)], Backend.INTERPRETER, "0.33.0") == ()
    assert ledger.unmatched([], Backend.INTERPRETER, "0.34.0") == ()


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (
            ENTRY.replace('outcome = "MISMATCH"', 'outcome = "BROKEN"'),
            2,
            "'outcome' is 'BROKEN'; it must be one of MISMATCH, NOT_IDENTICAL, N",
        ),
        (ENTRY.replace('outcome = "MISMATCH"', 'outcome = "PASS"'), 2, "'outcome' is 'PASS'; it must be one of MISMATCH"),
        (ENTRY.replace('entry = "layer"', 'entry = "back"'), 2, "'entry' is 'back'; it must be one of layer, fused_experts"),
        (ENTRY + 'level = "all"\n', 2, "'level' is 'all'; it must be one of smoke, nightly, deep"),
        (ENTRY.replace('vllm = "<=0.33.0"', 'vllm = "about 3"'), 2, "'vllm' is 'about 3'; it must be a specifier of versions"),
        (ENTRY.replace('"interpreter"', '"abacus"'), 2, "'backends': unknown backend 'abacus'; the backends are interpreter"),
        (ENTRY.replace('["interpreter"]', "[]"), 2, "'backends' must be a non-empty list"),
        (ENTRY.replace('note = "n"\n', ""), 2, "key 'note' is missing"),
        (ENTRY.replace("note", "notes"), 2, "unknown key 'notes'"),
        (ENTRY.replace('link = "x"', 'link = ""'), 2, "'link' must be a non-empty string"),
        (ENTRY.replace('"int8-*"', "[]"), 2, "'cases' must be a pattern or a list of patterns"),
        (ENTRY.replace('"int8-*"', '["int8-*", 3]'), 2, "'cases' must be a pattern or a list of patterns"),
        (ENTRY.replace('"W_SCALE_*"', "[]"), 2, "'signature' must be a pattern or a list of patterns"),
        (ENTRY.replace('link = "x"', "link = x"), 10, "not TOML"),
        (ENTRY + ENTRY, 2, "id 'a' is used twice"),
        (ENTRY + "peak = 2.5\n", 2, "'peak' goes with a signature of PEAK, got W_SCALE_*"),
        (PEAK.replace("peak = 2.5", ""), 2, "'peak' is missing; a signature of PEAK needs it: memory at once over what is needed"),
        (PEAK.replace("2.5", "'2.5'"), 2, "'peak' is '2.5'; a signature of PEAK needs it"),
        (PEAK.replace("2.5", "true"), 2, "'peak' is True; a signature"),
        (PEAK.replace("2.5", "1"), 2, "'peak' is 1; a signature"),
        (PEAK.replace("2.5", "9" * 400), 2, "'peak' is 999"),
        (PEAK.replace("2.5", "inf"), 2, "'peak' is inf; a signature"),
        ('title = "x"\n' + ENTRY, 1, "only [[issue]] tables belong here"),
        ('issue = "x"\n', 1, "only [[issue]] tables belong here, found another form of `issue`"),
        (ENTRY + f"level = {'1' * 5000}\n", 13, "a number of more than 4300 digits"),
        (ENTRY + f"level = {'[' * 3000}\n", 13, "brackets nested too deep"),
        (ENTRY.replace("2026-11-30", "yesterday"), 2, "'since' is 'yesterday'; it must be a date, such as 2026-11-30"),
        (ENTRY.replace("2026-11-30", "20261130"), 2, "'since' is '20261130'; it must be a date, such as 2026-11-30"),
        (ENTRY.replace("2026-11-30", "2026-11-31"), 2, "'since' is '2026-11-31'; it must be a date, such as 2026-11-30"),
    ],
)
def test_a_malformed_file_is_told_by_file_and_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(LedgerError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}:{line}: ")
    assert says in str(error.value)


def test_a_note_may_speak_of_an_entry(tmp_path: Path) -> None:
    note = 'note = """\nsee\n[[issue]]\nid = 3\n"""\n'
    assert load(written(tmp_path, ENTRY.replace('note = "n"\n', note))).issues[0].note == "see\n[[issue]]\nid = 3\n"
    text = ENTRY.replace('note = "n"\n', note) + ENTRY.replace('id = "a"', 'id = "b"').replace('link = "x"', 'link = ""')
    with pytest.raises(LedgerError) as error:
        load(written(tmp_path, text))
    assert str(error.value).startswith(f"{tmp_path / 'ledger.toml'}:{ENTRY.count(chr(10)) + 4 + 2}: 'link'")


def test_a_file_that_is_not_utf_8_is_told_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.toml"
    path.write_bytes(ENTRY.encode() + b"# caf\xe9\n")
    with pytest.raises(LedgerError, match="not UTF-8 text") as error:
        load(path)
    assert str(error.value).startswith(f"{path}:{ENTRY.count(chr(10)) + 1}: ")


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot be read"):
        load(tmp_path / "none.toml")


def test_brackets_in_ids_are_literal() -> None:
    assert matches("a[b]", "a[b]")
    assert not matches("ab", "a[b]")


def test_no_entry_of_ours_takes_any_failure() -> None:
    wide = [issue.id for issue in load().issues if any(pattern.startswith(("*", "?")) for pattern in issue.signature)]
    assert wide == []


def test_every_entry_of_ours_matches_a_pair_of_its_level() -> None:
    ledger = load()
    for level in Level:
        these = Ledger(issues=tuple(i for i in ledger.issues if i.level is level))
        for backend in {b for i in these.issues for b in i.backends}:
            assert these.unmatched(ids(level, backend), backend, "0.33.0") == ()


def test_what_entries_of_ours_say_of_questions_and_checks_can_be_said() -> None:
    checks, said = {check.value: {check.name} for check in DeviceCheck}, set[str]()
    for issue in load().issues:
        asked = {pattern.partition(":")[0] for pattern in issue.cases if ":" in pattern}
        if issue.outcome is not Outcome.NOT_IDENTICAL:
            continue
        words = {part.partition(":")[0] for signature in issue.signature for part in signature.split("+")}
        if asked & set(Question):
            assert words <= set(Oracle.__members__), issue.id
        elif asked & set(checks):
            assert words <= set[str]().union(*(checks[each] for each in asked)), issue.id
        elif asked & set(Bad):
            assert words <= {"ACCEPTED", "UNNAMED", "WRONG"}, issue.id
        said |= words if asked else set()
    assert {"PEAK", "LAGGING_STREAM", "ACCEPTED"} <= said
