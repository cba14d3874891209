"""Tests marked ``vllm`` drive the real one through the interpreter lane; the others need torch only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness.subject.vllm_layer import VllmSubject


def pytest_configure(config: pytest.Config) -> None:
    """The marker's meaning."""
    config.addinivalue_line("markers", "vllm: needs vLLM; runs in the interpreter environment")


@pytest.fixture(scope="session")
def interpreter() -> None:
    """The lane, active in this process."""
    from harness.subject.interpreter.activate import activate

    activate()


@pytest.fixture(scope="session")
def subject(interpreter: None) -> VllmSubject:
    """One real subject per process, as in a run."""
    from harness.subject.vllm_layer import VllmSubject

    return VllmSubject()
