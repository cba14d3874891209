"""Outcomes and verdicts: plain data, no tensors, ready to be written as one JSON line."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """How one (case, entry, backend) ended. Closed: nothing else exists."""

    PASS = "PASS"
    MISMATCH = "MISMATCH"  # outside the derived bound
    NOT_IDENTICAL = "NOT_IDENTICAL"  # an exact claim broken
    NONDETERMINISTIC = "NONDETERMINISTIC"  # two runs differ
    LOAD_ERROR = "LOAD_ERROR"
    RUN_ERROR = "RUN_ERROR"
    UNSUPPORTED = "UNSUPPORTED"  # declared in harness/backends.py and refused by vLLM; without a reason: signature UNREASONED
    UNAVAILABLE = "UNAVAILABLE"  # this machine or this vLLM cannot be driven: what was looked for is said


NOT_FINITE = "NOT_FINITE"  # signature where no output is a number: nothing is left by which one fault could be told from another
OUT_OF_MEMORY = "OUT_OF_MEMORY"  # signature, with "@" and the stage, where device memory ran out
LOST = "CUDA_CONTEXT_LOST"  # likewise; sticky: every later call of the process fails too
UNREASONED = "UNREASONED"  # signature of UNSUPPORTED where an assertion, or an error of the code below, stands for vLLM's reason


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFit:
    """How well one fault of faults.py explains a mismatch."""

    fault: str
    experts: tuple[int, ...]  # experts that have it; empty: it is not a fault of single experts, or none has it
    residual: float  # |actual - faulty expected| over |actual - expected|, 2-norms, rows of equal weight, last rounding aside


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement of one pair."""

    outcome: Outcome
    claim: str  # one sentence: what was claimed and does or does not hold
    margin: float | None = None  # worst error / allowed; 1 is the edge; None where nothing was compared
    worst: dict[str, object] = field(default_factory=dict)  # index, actual, expected, low, high
    spread: dict[str, object] = field(default_factory=dict)  # counts of bad elements, rows, columns
    pattern: str = ""  # "every bad token is routed to expert 3"
    gains: dict[str, object] = field(default_factory=dict)  # every expert's [alpha, se, smallest flagged]; the flagged groups
    fits: tuple[FaultFit, ...] = ()  # best first
    detail: str = ""  # exception text or vLLM's reason, verbatim
    signature: str = ""  # short and stable, what the ledger matches: "W_SCALE_FLAT_INDEX@1,2,3"
