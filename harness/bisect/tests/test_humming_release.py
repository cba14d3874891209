"""The founding fault of Humming's conversion (vllm#56606) in the release that had it, by the oracles of harness/load_humming.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.architectures import VARIABLE
from harness.bisect import releases
from harness.environment import child_environ

SIZES = "bf16-e3k1m3h128i128-balanced"
ONLINE, STORED = f"e4m3fn-group32-dyngroup32-online-silu-{SIZES}", f"e4m3fn-channel-dyntoken-ct-silu-{SIZES}"


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_online_mxfp8_of_0_30_0_misses_its_scales(tmp_path: Path) -> None:
    releases.unpack("vllm==0.30.0", tmp_path)
    environment = child_environ() | {VARIABLE: "sm90"}
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), environment["PYTHONPATH"]))
    command = [sys.executable, "-m", "harness.subject.tests.humming_child", f"nothing:{ONLINE}", f"nothing:{STORED}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    online, stored = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert online["error"] == "KeyError: 'weight_scale'"
    assert (stored["error"], stored["findings"]) == ("", [])
