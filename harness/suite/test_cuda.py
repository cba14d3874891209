"""Every check that only a GPU can fail, of a pair of each scheme that the lane runs. Checks are in harness/device_checks.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness.device_checks import Checked
    from harness.suite.worker import Worker


def test_device(checked: Checked, worker: Worker) -> None:
    """Passes when the bits are the same, or differ as the ledger says; otherwise the message says where."""
    if news := worker.run(checked.pair, checked.check).news:
        pytest.fail(news, pytrace=False)
