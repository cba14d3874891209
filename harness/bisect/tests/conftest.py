"""Tests marked ``vllm`` need it installed; those marked ``slow`` fetch releases or take minutes: ``-m slow``, ``-m "vllm or slow"``."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from hypothesis import settings

settings.register_profile("moediff", deadline=None, derandomize=True)
settings.load_profile("moediff")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "vllm: needs vLLM; left out where it is not installed")
    config.addinivalue_line("markers", "slow: fetches releases or takes minutes; run with -m slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    absent = {"slow"} if "slow" not in config.getoption("markexpr") else set()
    absent |= {"vllm"} if find_spec("vllm") is None else set()
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in absent)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
