"""The interpreter platform answers as the GPU that was asked for. One process each: vLLM and Humming keep what they were told."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from harness.architectures import ARCHITECTURES, VARIABLE
from harness.environment import child_environ

ASK = """
import json
from harness.subject.interpreter.activate import activate
activate()
import torch
from vllm.platforms import current_platform as here
from vllm.utils.deep_gemm import is_deep_gemm_supported
answers = {
    "capability": here.get_device_capability().to_int(),
    "hopper": here.is_device_capability(90),
    "blackwell": here.is_device_capability_family(100),
    "fp8": here.supports_fp8(),
    "deep_gemm": is_deep_gemm_supported(),
    "compute_units": here.num_compute_units(),
    "cuda": here.is_cuda(),
}
try:
    answers["torch"] = list(torch.cuda.get_device_capability())
except RuntimeError as error:
    answers["torch"] = "no device"
import humming.device
try:
    answers["humming"] = humming.device.DeviceInfo().sm_version
except (ImportError, RuntimeError, AssertionError) as error:
    answers["humming"] = "no device"
print("answers" + json.dumps(answers))
"""

pytestmark = pytest.mark.vllm


def answers(architecture: str) -> dict[str, object]:
    environment = {name: value for name, value in child_environ().items() if name != VARIABLE} | (
        {VARIABLE: architecture} if architecture else {}
    )
    asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False, env=environment, cwd=os.getcwd())
    assert asked.returncode == 0, asked.stderr
    return dict(json.loads(next(line for line in asked.stdout.splitlines() if line.startswith("answers")).removeprefix("answers")))


@pytest.mark.parametrize("name", ["sm80", "sm100"])
def test_every_query_has_one_answer(name: str) -> None:
    gpu = ARCHITECTURES[name]
    assert answers(name) == {
        "capability": gpu.number,
        "hopper": name == "sm90",
        "blackwell": name == "sm100",
        "fp8": gpu.number >= 89,
        "deep_gemm": gpu.deep_gemm,
        "compute_units": gpu.multiprocessors,
        "cuda": True,
        "torch": list(gpu.capability),
        "humming": gpu.number,
    }


def test_unasked_it_is_hopper_without_deep_gemm_and_no_device_answers() -> None:
    told = answers("")
    assert (told["capability"], told["deep_gemm"], told["torch"], told["humming"]) == (90, False, "no device", "no device")
