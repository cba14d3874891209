"""``moediff run`` takes ids as lists and records have them: ``case``, ``case[entry]``, ``relation:case[entry]``."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases.case import Entry, Level
from harness.backends import Backend
from harness.cli import main
from harness.commands.run import pasted
from harness.exits import Exit
from harness.pairs import relate, select
from reports.records import read_run

RELATED = next(each for each in relate(Level.SMOKE, (), None, Backend.INTERPRETER) if each.pair.entry is Entry.FUSED_EXPERTS)
CASE = select(Level.SMOKE)[0].case.id


def test_an_id_names_case_entry_and_what_is_asked() -> None:
    assert pasted([RELATED.id], None) == ([RELATED.pair.case.id], "fused_experts", f"([{RELATED.relation}:)")
    assert pasted([f"{CASE}[layer]", f"{CASE}[layer]"], None) == ([CASE, CASE], "layer", "")
    assert pasted([CASE], "layer") == ([CASE], "layer", "")
    assert pasted([f"a:{CASE}", f"b:{CASE}"], None) == ([CASE, CASE], None, "([a: or [b:)")


def test_only_what_the_id_names_is_run(tmp_path: Path) -> None:
    assert main(["run", RELATED.id, "--subject=fake", "-n0", f"--records={tmp_path}"]) == Exit.AS_THE_LEDGER_SAYS
    assert [record.pair for record in read_run(*tmp_path.iterdir())] == [RELATED.id]


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ([f"{CASE}[layer]", f"{CASE}[fused_experts]"], "the ids name different entries; run those of one entry at a time"),
        ([f"{CASE}[layer]", CASE], "the ids name different entries"),
        ([f"loaded:{CASE}[layer]", f"{CASE}[layer]"], "some ids name what is asked of a pair and others none; run them apart"),
        ([f"nothing:{CASE}[layer]"], "no pair matches -k '([nothing:)'"),
        ([f"loaded:{CASE}[back]"], "unknown entry 'back'"),
        (["loaded:int8"], "'int8' is not a case"),
    ],
)
def test_ids_that_do_not_go_together_are_misuse(ids: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *ids, "--subject=fake", "-n0", f"--records={tmp_path}"]) == Exit.MISUSE
    assert sentence in capsys.readouterr().err
