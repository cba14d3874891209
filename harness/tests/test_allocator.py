"""Freed memory stays with the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.environment import child_environ

_FAULTS = """
import resource, sys
import torch
from harness.allocator import keep_freed_memory
if sys.argv[1] == "kept" and not keep_freed_memory():
    sys.exit(3)
torch.zeros(1 << 19, dtype=torch.float64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    a = torch.ones(1 << 19, dtype=torch.float64)
    b = a + a
    del a, b
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(what: str) -> int:
    done = subprocess.run([sys.executable, "-c", _FAULTS, what], capture_output=True, text=True, check=False, env=child_environ())
    if done.returncode == 3:
        pytest.skip("this C library has no mallopt")
    return int(done.stdout)


def test_freed_tensors_are_not_fetched_from_the_system_again() -> None:
    assert page_faults("kept") < page_faults("as it comes") / 4
