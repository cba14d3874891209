"""The INT8 fault of vLLM up to 0.33.0 (vllm#58532) in four states: base M, an unrelated change P, our own correction A, and both PA.

The correction takes the weight scale's layout from the strides of its tensor instead of from the activation flag.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from harness.bisect.trouble import Exit
from harness.cli import main

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

DATA = Path(__file__).parent / "data"
UNRELATED, CORRECTION = DATA / "unrelated.patch", DATA / "weight_scale_by_shape.patch"
LATTICE = "int8-channel-static-quark-relu2_no_mul-fp32-e4k1m8h128i64-skewed-norenorm-lattice"
DENSE = "int8-channel-static-quark-silu-fp16-e4k2m8h128i64-balanced"
UNTOUCHED = "int8-channel-dyntoken-ct-silu-fp32-e4k2m8h128i64-balanced"


def test_only_the_correction_changes_anything(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOEDIFF_CACHE", str(tmp_path))
    base = f"release:{version('vllm')}"
    states = {"M": base, "P": f"{base}+{UNRELATED}", "A": f"{base}+{CORRECTION}", "PA": f"{base}+{UNRELATED}+{CORRECTION}"}
    named = [word for name, state in states.items() for word in ("--state", f"{name}={state}")]
    cases = [LATTICE, DENSE, UNTOUCHED, "--entry", "fused_experts", "--backend", "interpreter"]
    assert main(["compare", *named, "--controls", *cases]) == Exit.BAD
    page = capsys.readouterr().out
    assert page.startswith("## 2 of 3 pairs differ between M, P, A, PA\n"), page
    rows = {line.split("`")[1]: [cell.strip() for cell in line.split("|")[2:-1]] for line in page.splitlines() if line.startswith("| `")}

    lattice = "NOT_IDENTICAL, W_SCALE_FLAT_INDEX@all, 1023 of 1024 elements, 18.0449219 for 255.4375 at [5, 55]"
    assert rows[f"{LATTICE}[fused_experts]"] == [lattice, lattice, "PASS, equal", "PASS, equal"]
    dense = "MISMATCH, W_SCALE_FLAT_INDEX@all, 1024 of 1024 elements, -1.07226562 for -5.77612305 at [6, 32]"
    assert rows[f"{DENSE}[fused_experts]"] == [dense, dense, "PASS, equal", "PASS, equal"]

    assert "- M → A: run × numeric: loading is bit for bit alike; the output differs first at [" in page
    assert "- M → P:" not in page
    assert "Control (every scale of an expert without tokens doubled; 12 runs): output identical in every state." in page
