"""Freed memory stays with the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.environment import child_environ

_GIVEN_BACK = """
import sys
import torch
from harness.allocator import keep_freed_memory
if sys.argv[1] == "kept" and not keep_freed_memory():
    sys.exit(3)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
a = torch.ones(1 << 20, dtype=torch.float64)
before = resident()
del a
print(before - resident())
"""
_SIZE = 8 << 20  # bytes of the tensor


def given_back(what: str) -> int:
    """Bytes that left the process with the tensor."""
    done = subprocess.run([sys.executable, "-c", _GIVEN_BACK, what], capture_output=True, text=True, check=False, env=child_environ())
    if done.returncode == 3:
        pytest.skip("this C library has no mallopt")
    return int(done.stdout)


def test_freed_tensors_stay_with_the_process() -> None:
    assert given_back("as it comes") > _SIZE / 2
    assert given_back("kept") < _SIZE / 2
