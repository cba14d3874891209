from __future__ import annotations

import dataclasses
from pathlib import Path

from harness.verdict import UNREASONED, Outcome, Verdict
from reports import html, summary
from reports.records import Record, Start, Status

START = Start(case="int8-a", entry="layer", backend="interpreter", fields={}, environment={"vllm": "0.33.0"}, worker="gw0")
LINK = "https://example.invalid/issues/1"


def record(case: str, outcome: Outcome, status: Status, **more: object) -> Record:
    verdict = Verdict(outcome=outcome, claim="inside the interval", margin=0.5, signature="W_SCALE_FLAT_INDEX@1,2")
    return Record.of(dataclasses.replace(START, case=case), verdict=verdict, status=status, **more)


RECORDS = [
    record("a", Outcome.PASS, Status.CLEAN, seconds={"load": 0.25, "run": 0.25}, peak_rss_bytes=3 * 2**30),
    record("b", Outcome.MISMATCH, Status.KNOWN, ledger="int8-static-channel", link=LINK),
    record("c", Outcome.MISMATCH, Status.KNOWN, ledger="int8-static-channel", link=LINK),
    record("d", Outcome.MISMATCH, Status.NEW, news="expert 3 <is> wrong\nsecond line"),
    record("e", Outcome.MISMATCH, Status.NEW, ledger="x", news="entry 'x' expects RUN_ERROR\nsecond line"),
]


def test_the_summary_counts_confirms_and_names_what_is_new() -> None:
    text = summary.render(RECORDS, where="some/where", width=200)
    lines = text.splitlines()
    assert any("MISMATCH" in line and [n for n in line.replace("│", " ").split() if n.isdigit()] == ["4", "0", "2", "2"] for line in lines)
    assert f"int8-static-channel: 2 pairs · W_SCALE_FLAT_INDEX@1,2 · {LINK}" in text
    assert "New: 2 pairs\n" in text
    assert "MISMATCH d[layer]: inside the interval (W_SCALE_FLAT_INDEX@1,2)" in text
    assert "MISMATCH e[layer]: entry 'x' expects RUN_ERROR\n" in text
    assert "peak worker memory 3.00 GiB" in text
    assert "median pair 0.50 s" in text
    assert lines[-1] == "Records: some/where"


def test_refusals_without_a_reason_are_listed() -> None:
    verdict = Verdict(
        outcome=Outcome.UNSUPPORTED, claim="refused without a reason: <groups> only", detail="AssertionError: \nmore", signature=UNREASONED
    )
    bare = dataclasses.replace(RECORDS[0], verdict=verdict)
    text, page = summary.render([*RECORDS, bare, bare], where="."), html.render([bare])
    assert "  <groups> only: 2 pairs · AssertionError:" in text
    assert "refused without a reason: &lt;groups&gt; only" in page
    reasoned = dataclasses.replace(bare, verdict=dataclasses.replace(verdict, signature=""))
    faked = dataclasses.replace(bare, environment={"subject": "fake"})
    for other in (reasoned, faked):
        assert "Upstream refuses" not in summary.render([other], where=".")
        assert "Refused upstream" not in html.render([other])


def test_declared_refusals_are_told_with_their_reasons() -> None:
    def refused(reason: object) -> Record:
        verdict = Verdict(outcome=Outcome.UNSUPPORTED, claim=f"refused by design: reason {reason}")
        return dataclasses.replace(RECORDS[0], verdict=verdict)

    text = summary.render([*map(refused, range(10)), refused(9)], where=".", width=200)
    assert "Refused by design, as declared\n  reason 9: 2 pairs\n  reason 0: 1 pair\n" in text
    assert "  and 2 reasons more in the records\n" in text
    assert "Refused by design" not in summary.render(RECORDS[:1], where=".")


def test_layers_of_which_nothing_ran_are_told_apart() -> None:
    only = dataclasses.replace(RECORDS[0], ran={"architecture": "sm90"})
    assert "as sm90: loaded and converted, nothing ran" in " ".join(summary.render([only], where=".", width=200).split())
    assert "nothing ran" not in summary.render(RECORDS[:1], where=".", width=200)


def test_the_summary_of_a_clean_run_says_so() -> None:
    assert "Nothing new" in summary.render(RECORDS[:3], where=".")


def test_kinds_of_records_are_counted_apart() -> None:
    records = [*RECORDS, dataclasses.replace(RECORDS[0], relation="repeated", kind="exact relation")]
    text, page = summary.render(records, where=".", width=200), html.render(records)
    assert text.splitlines()[0].strip() == "5 pairs, 1 exact relation on interpreter"
    passed = next(line for line in text.splitlines() if "PASS" in line)
    assert [n for n in passed.replace("│", " ").split() if n.isdigit()] == ["1", "1", "2", "0", "0"]
    assert "<h1>5 pairs, 1 exact relation on interpreter</h1>" in page
    assert "<code>repeated:a[layer]</code>" in page


def test_the_summary_of_an_interrupted_run_does_not_say_that_all_is_well() -> None:
    text = summary.render(RECORDS[:3], where=".", unfinished=7)
    assert "Nothing new in what was run; 7 results are missing" in text
    assert "ended as the ledger says" not in text


def test_a_ledger_entry_that_matched_nothing_is_no_clean_run() -> None:
    text = summary.render(RECORDS[:3], ["ledger entry 'x' matches no pair"], where=".")
    assert "ledger entry 'x' matches no pair" in text
    assert "Nothing new" not in text


def test_the_page_shows_every_pair_and_escapes_what_it_is_given() -> None:
    page = html.render(RECORDS)
    for case in "abcde":
        assert f"<code>{case}[layer]</code>" in page
    assert "expert 3 &lt;is&gt; wrong" in page
    assert f'<a href="{LINK}">' in page
    assert "0.33.0" in page


def test_a_link_that_is_no_address_is_not_made_one() -> None:
    assert "href=" not in html.render([record("b", Outcome.MISMATCH, Status.KNOWN, ledger="x", link="javascript:alert(1)")])


def test_the_page_of_nothing_can_be_written(tmp_path: Path) -> None:
    assert html.write(tmp_path, []).read_text().startswith("<!doctype html>")
