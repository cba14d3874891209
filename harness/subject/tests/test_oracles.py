"""The table of backends says what vLLM's oracles say: ways of quantizing, every activation, on every GPU lane, per architecture."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from harness.architectures import VARIABLE
from harness.backends import SPECS, Backend
from harness.environment import child_environ

pytestmark = pytest.mark.vllm
LANES = [backend.value for backend in Backend if SPECS[backend].needs_gpu and not SPECS[backend].environment]


_STEP = 11  # of the cases: as many as an activation has ways to be quantized, so that each is asked with other ways per architecture


@pytest.mark.parametrize(("architecture", "first"), [("sm90", 0), ("sm100", 3), ("sm120", 7)])
def test_what_is_declared_is_what_the_oracles_say(architecture: str, first: int) -> None:
    here = [name for name in LANES if architecture in SPECS[Backend(name)].architectures]
    command = [sys.executable, "-m", "harness.subject.tests.oracles_child", str(_STEP), str(first), *here]
    told = subprocess.run(command, capture_output=True, text=True, check=False, env=child_environ() | {VARIABLE: architecture})
    assert told.returncode == 0, told.stderr[-2000:]
    *differences, asked = [json.loads(line) for line in told.stdout.splitlines() if line.startswith("[")]
    assert asked[0] == "asked"
    assert asked[1] >= 60 * len(here) > 400
    assert differences == []
