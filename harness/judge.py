"""Judging: a comparison becomes a verdict. (First slice: [M] replaces it.)"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cases.batch import Batch
from cases.case import MoECase
from cases.checkpoint import Checkpoint
from harness.compare import Comparison
from harness.verdict import Outcome, Verdict
from references.moe import Answer
from references.vocabulary import Recipe


def raised(outcome: Outcome, detail: str) -> Verdict:
    """vLLM raised where the table says it works."""
    return Verdict(outcome=outcome, claim="vLLM raised", detail=detail, signature=detail.split(":", 1)[0])


def not_refused(reason: str) -> Verdict:
    """A declared refusal that did not happen."""
    return Verdict(
        outcome=Outcome.RUN_ERROR, claim=f"declared as refused ({reason}), but it ran: the table is out of date", signature="NOT_REFUSED"
    )


def wrong_class(ran: str, wanted: Iterable[str]) -> Verdict:
    """Another class than the forced backend's ran."""
    return Verdict(
        outcome=Outcome.RUN_ERROR, claim=f"{ran} ran where {' or '.join(sorted(wanted))} was forced", signature=f"WRONG_CLASS:{ran}"
    )


def judge(
    case: MoECase, recipe: Recipe, checkpoint: Checkpoint, batch: Batch, answer: Answer, actual: torch.Tensor, comparison: Comparison
) -> Verdict:
    """The verdict of a pair that ran."""
    return Verdict(outcome=comparison.outcome, claim="the output lies within the derived interval", margin=comparison.margin)
