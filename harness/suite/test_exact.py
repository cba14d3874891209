"""Every exact relation of every lattice pair of the level. Claims and exemptions are in harness/relations.py, the pairs in cases/."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness.pairs import Related
    from harness.suite.worker import Worker


def test_relation(related: Related, worker: Worker) -> None:
    """Passes when the relation holds bit for bit, or breaks as the ledger says; otherwise the message says what moved."""
    relation, pair = related
    if news := worker.run(pair, relation).news:
        pytest.fail(news, pytrace=False)
