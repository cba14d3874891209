"""Loading for Humming without a GPU: what its conversion is handed, and what the GEMM's own layout holds afterwards.

Everything but three operators is vLLM's and Humming's own code; those (harness/subject/interpreter/ops_humming.py) only move bits, and
are compared with the compiled ones on a GPU by harness/subject/fidelity.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from cases.case import Entry
from harness import judge, ledger
from harness.architectures import VARIABLE
from harness.backends import Backend
from harness.environment import child_environ, version
from harness.ledger import Standing
from harness.verdict import Outcome

pytestmark = pytest.mark.vllm
SIZES = "bf16-e3k1m3h128i128-balanced"
FORMATS = (
    "e4m3fn-channel-dyntoken-ct",
    "e4m3fn-tensor-static-ct",
    "e4m3fn-block128-dyngroup128-ct",
    "e4m3fn-block128-dyngroup128-vllmfp8",
    "e4m3fn-channel-dyntoken-online",
    "e4m3fn-block128-dyngroup128-online",
    "e4m3fn-group32-dyngroup32-modelopt",
    "e4m3fn-group32-dyngroup32-ct",
    "e4m3fn-group32-dyngroup32-online",
    "e2m1-group32-dyngroup32-quark",
    "int8-channel-dyntoken-ct",
    "int8-channel-none-online",
)
CASES = tuple(f"{name}-{activation}-{SIZES}" for name in FORMATS for activation in ("silu", "relu2_no_mul"))
FP8, MXFP8 = f"e4m3fn-channel-dyntoken-online-silu-{SIZES}", f"e4m3fn-group32-dyngroup32-modelopt-silu-{SIZES}"


ONLINE_MXFP4 = tuple(f"e2m1-group32-dyngroup32-online-{activation}-{SIZES}" for activation in ("silu", "relu2_no_mul"))
PLANTED = ("scale_of_another_expert", "scales_outside_the_state", "one_bit_in_the_layout")


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, Any]]:
    """What one process tells: every case as installed, and two with each planted fault."""
    asked = [f"nothing:{case}" for case in (*CASES, *ONLINE_MXFP4)]
    asked += [f"{plant}:{case}" for plant in PLANTED for case in (FP8, MXFP8)] + [f"registered:{case}" for case in ONLINE_MXFP4]
    command = [sys.executable, "-m", "harness.subject.tests.humming_child", *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=child_environ() | {VARIABLE: "sm90"})
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["asked"] for line in lines] == asked
    return {line["asked"]: line for line in lines}


@pytest.mark.parametrize("case", CASES)
def test_the_conversion_sees_and_keeps_every_code_and_scale(told: dict[str, dict[str, Any]], case: str) -> None:
    found = told[f"nothing:{case}"]
    assert (found["error"], found["findings"]) == ("", [])
    assert "convert_to_humming_moe_kernel_format" in found["converters"]


@pytest.mark.parametrize("case", [FP8, MXFP8])
def test_planted_faults_are_seen(told: dict[str, dict[str, Any]], case: str) -> None:
    another, outside, bit = (told[f"{plant}:{case}"] for plant in PLANTED)
    assert {text.split()[0] for text in another["findings"]} == {"LEFT:humming:weight_scale"}
    assert outside["error"] == "KeyError: 'weight_scale'"
    assert [text.split()[0] for text in bit["findings"]] == ["LEFT:humming:weight"] * 2
    assert all("of expert 2: 1 of" in text for text in bit["findings"])


@pytest.mark.parametrize("case", ONLINE_MXFP4)
def test_online_mxfp4_fails_as_the_ledger_says_and_repaired_it_does_not(told: dict[str, dict[str, Any]], case: str) -> None:
    installed, repaired = told[f"nothing:{case}"], told[f"registered:{case}"]
    assert (repaired["error"], repaired["findings"]) == ("", [])
    known = ledger.load(ledger.LEDGER).judge(
        judge.raised(Outcome.LOAD_ERROR, installed["error"]), case, Entry.LAYER, Backend.HUMMING, version("vllm") or ""
    )
    assert known.standing is Standing.KNOWN
    assert known.issue is not None
    assert known.issue.id == "humming-online-mxfp4-scales-outside-state"
