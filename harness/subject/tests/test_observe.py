"""The dtype of A is noted for every launcher that a lane has: the launchers are stubs under vLLM's own names."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.subject.observe import watch

pytestmark = pytest.mark.vllm
EXPERTS = "vllm.model_executor.layers.fused_moe.experts"
OUT, A, B = torch.empty(1), torch.empty(1, dtype=torch.float8_e4m3fn), torch.empty(1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("module", "name", "given"),
    [
        ("vllm._custom_ops", "cutlass_moe_mm", (OUT, A, B)),
        ("vllm._custom_ops", "cutlass_w4a8_moe_mm", (OUT, A, B)),
        ("vllm._custom_ops", "moe_wna16_marlin_gemm", (A, OUT, B)),
        (f"{EXPERTS}.deep_gemm_moe", "m_grouped_fp8_gemm_nt_contiguous", ((A, OUT), (B, OUT))),
        (f"{EXPERTS}.batched_deep_gemm_moe", "fp8_m_grouped_gemm_nt_masked", ((A, OUT), (B, OUT))),
        (f"{EXPERTS}.nvfp4_emulation_moe", "invoke_fused_moe_nvfp4_emulation_kernel", (A, B, OUT)),
    ],
)
def test_what_enters_each_gemm(module: str, name: str, given: tuple[Any, ...], interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = importlib.import_module(module)
    assert hasattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: None)
    with watch(None) as seen:
        getattr(owner, name)(*given)
    assert seen.gemm_dtypes == ["float8_e4m3fn"]


def test_a_launcher_may_be_given_a_by_name(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import _custom_ops as ops

    monkeypatch.setattr(ops, "cutlass_moe_mm", lambda out_tensors, a_tensors, b_tensors: None)
    with watch(None) as seen:
        ops.cutlass_moe_mm(OUT, a_tensors=A, b_tensors=B)
    assert seen.gemm_dtypes == ["float8_e4m3fn"]


def test_humming_launches_through_its_experts(interpreter: None) -> None:
    class Experts:
        def apply(self, hidden_states: torch.Tensor) -> None:
            self.humming_forward("w13", inputs=hidden_states, weight=B)

        def humming_forward(self, sublayer_name: str, inputs: torch.Tensor, weight: torch.Tensor) -> None: ...

    experts = Experts()
    with watch(SimpleNamespace(quant_method=SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=experts)))) as seen:  # type: ignore[arg-type]
        experts.apply(A)
    assert (seen.experts, seen.gemm_dtypes) == (["Experts"], ["float8_e4m3fn"])
    assert "humming_forward" not in vars(experts)
