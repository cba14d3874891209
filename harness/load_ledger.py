"""What the ledger says about a layer that was loaded for a GPU that is not here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cases.case import Entry
from harness.environment import version
from harness.ledger import Judged, Standing
from harness.verdict import Outcome

if TYPE_CHECKING:
    from cases.case import MoECase
    from harness.backends import Backend
    from harness.ledger import Ledger
    from harness.verdict import Verdict

LOAD = "load"  # relation of the records: loaded, and nothing ran


def judge_loading(known: Ledger, verdict: Verdict, case: MoECase, backend: Backend) -> Judged:
    """An entry about the forward says nothing of a layer that loads; one about loading is strict, unless loading did not get that far:
    then the verdict quotes what it ended with."""
    judged = known.judge(verdict, case.id, Entry.LAYER, backend, version("vllm") or "")
    if judged.standing is Standing.STOPPED_FAILING and judged.issue is not None:
        ended_early = verdict.outcome is Outcome.PASS and bool(verdict.detail)
        if judged.issue.outcome is not Outcome.LOAD_ERROR or ended_early:
            return Judged(standing=Standing.CLEAN)
    return judged


def judge_question(known: Ledger, verdict: Verdict, question: str, case: MoECase, backend: Backend) -> Judged:
    """An entry about ``question:case`` is strict. A layer that cannot be loaded is known where the entry about the case says so."""
    here = version("vllm") or ""
    judged = known.judge(verdict, f"{question}:{case.id}", Entry.LAYER, backend, here)
    if judged.standing is Standing.STOPPED_FAILING and verdict.outcome is Outcome.PASS and verdict.detail:  # it ended before it could fail
        return Judged(standing=Standing.CLEAN)
    if judged.issue is not None or verdict.outcome is not Outcome.LOAD_ERROR:
        return judged
    broad = known.judge(verdict, case.id, Entry.LAYER, backend, here)
    return broad if broad.standing is Standing.KNOWN else judged
