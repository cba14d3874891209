"""Every question about loading, of every pair of the level that enters by the layer. Questions are in harness/loading.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness.loading import Asked
    from harness.suite.worker import Worker


def test_loading(loading: Asked, worker: Worker) -> None:
    """Passes when the oracles hold, or break as the ledger says; otherwise the message says what was loaded wrongly."""
    question, pair = loading
    if news := worker.run(pair, question).news:
        pytest.fail(news, pytrace=False)
