"""Runs and matrices for GPUs that are not here: whole commands, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.architectures import VARIABLE
from harness.environment import child_environ
from reports.matrix import State, cells
from reports.records import MERGED, Record, merge, read

pytestmark = pytest.mark.vllm
SIZES = "silu-bf16-e3k2m2h128i128-balanced"
CHANNEL, BLOCK, INT8 = (
    f"{each}-{SIZES}" for each in ("e4m3fn-channel-dyntoken-ct", "e4m3fn-block128-dyngroup128-ct", "int8-channel-dyntoken-ct")
)


def run(records: Path, architecture: str, backend: str, *cases: str) -> dict[tuple[str, str], Record]:
    """What ``moediff run`` recorded, by case and relation; nothing of it is news."""
    command = [sys.executable, "-m", "harness.cli", "run", "--backend", backend, "--architecture", architecture, "-n", "0"]
    asked = [*command, "--entry", "layer", "--records", str(records), *cases]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, env=child_environ())
    assert done.returncode == 0, done.stdout[-2000:]
    (made,) = records.iterdir()
    return {(record.case, record.relation): record for record in read(made / MERGED)}


def test_the_interpreter_lane_refuses_what_an_a100_cannot(tmp_path: Path) -> None:
    told = run(tmp_path, "sm80", "interpreter", CHANNEL, INT8)
    assert told[CHANNEL, ""].verdict.outcome == "UNSUPPORTED"
    assert "quantization scheme" in told[CHANNEL, ""].verdict.detail
    assert told[INT8, ""].verdict.outcome == "PASS"
    assert told[INT8, ""].environment["architecture"] == "sm80"


def test_the_interpreter_lane_rounds_as_a_b200_does(tmp_path: Path) -> None:
    told = run(tmp_path, "sm100", "interpreter", BLOCK)[BLOCK, ""]
    assert told.verdict.outcome == "PASS"
    assert "ue8m0" in str(told.ran["recipe"])


def test_other_lanes_are_chosen_and_loaded(tmp_path: Path) -> None:
    told = run(tmp_path, "sm100", "marlin", CHANNEL)[CHANNEL, "load"]
    assert (told.verdict.outcome, told.ran["stops_at"]) == ("PASS", "_C::gptq_marlin_repack")


def test_what_converters_are_handed_is_observed_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    words, mxfp8 = (f"{each}-silu-bf16-e4k2m8h128i64-balanced" for each in ("int4-group32-none-gptq", "e4m3fn-group32-dyngroup32-online"))
    told = run(tmp_path, "sm90", "marlin", words, mxfp8)
    for case, converter in ((words, "convert_to_wna16_moe_kernel_format"), (mxfp8, "prepare_mxfp8_moe_layer_for_marlin")):
        record = told[case, "loaded"]
        assert record.verdict.outcome == "PASS"
        assert "gptq_marlin_repack" in str(record.ran["stops_at"])
        assert converter in str(record.ran["converters"])


def test_a_matrix_of_two_lanes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "harness.matrix", str(tmp_path), "sm100", "flashinfer-cutlass", "deep-gemm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=child_environ() | {VARIABLE: "sm100"}, cwd=os.getcwd())
    assert done.returncode == 0, done.stderr
    found = cells(merge(tmp_path))
    assert [cell for cell in found if State.NEW in cell.states] == []
    at = {(cell.way, cell.backend): cell for cell in found}
    blocks = at["e4m3fn block128 x dyngroup128, ct", "flashinfer-cutlass"]
    assert blocks.worst is State.REFUSED
    assert "quantization scheme" in blocks.reasons[0]
    assert at["e4m3fn tensor x static, ct", "flashinfer-cutlass"].classes == ("FlashInferExperts",)
    assert at["e4m3fn block128 x dyngroup128, ct", "deep-gemm"].worst is State.PARTLY
