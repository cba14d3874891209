"""Every pair of the level, through the whole pipeline. The cases, and what is expected of each, are in cases/."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness.pairs import Pair
    from harness.suite.worker import Worker


def test_pair(pair: Pair, worker: Worker) -> None:
    """Passes when the pair ends as the ledger says; otherwise the message says what is new."""
    if news := worker.run(pair).news:
        pytest.fail(news, pytrace=False)  # no traceback: its frames would keep tensors alive and say nothing
