"""Which pairs may give other bits from run to run, and why. Declared here; each run must then be one that the reference allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cases.case import Entry
from harness.backends import SPECS, Backend

if TYPE_CHECKING:
    from cases.case import MoECase

_ATOMIC = "index_add_ adds the rows of a token with atomic additions, in any order"  # topk_weight_and_reduce.py


def why_not(case: MoECase, entry: Entry, backend: Backend) -> str | None:
    """None where every run must give the same bits. Two addends have one order."""
    return _ATOMIC if entry is Entry.BATCHED and SPECS[backend].needs_gpu and case.top_k > 2 else None
