"""triton_kernels through Triton's interpreter: which experts ran, what is fixed once, what vLLM does wrong there."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cases.case import Entry, MoECase
from harness.backends import Backend
from harness.pipeline import run_pair
from harness.verdict import Outcome

if TYPE_CHECKING:
    from harness.subject.vllm_layer import VllmSubject

pytestmark = pytest.mark.vllm
GPT_OSS = "e2m1-group32-none-gptoss-swigluoai-bf16"
RAN = [  # case, experts, outcome, signature
    ("e4k2m3h64i32-balanced", "OAITritonMxfp4ExpertsMonolithic", Outcome.PASS, ""),
    ("e4k2m3h64i32-balanced-bias-norenorm", "OAITritonExperts", Outcome.PASS, ""),
    ("e4k1m3h64i32-balanced-norenorm-onin", "OAITritonExperts", Outcome.MISMATCH, "ROUTER_WEIGHT_TWICE"),
]


@pytest.mark.parametrize(("rest", "experts", "outcome", "signature"), RAN, ids=[rest for rest, *_ in RAN])
def test_gpt_oss(subject: VllmSubject, rest: str, experts: str, outcome: Outcome, signature: str) -> None:
    result = run_pair(MoECase.from_id(f"{GPT_OSS}-{rest}"), Entry.LAYER, Backend.INTERPRETER, subject)
    assert (result.verdict.outcome, result.verdict.signature) == (outcome, signature)
    assert (result.extras["experts_class"], result.extras["gemm_dtypes"]) == (experts, ["bfloat16", "bfloat16"])


def test_a_scale_of_another_group_shows(subject: VllmSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe")
    original = module.matmul_ogs

    def rolled(x: Any, w: Any, *args: Any, precision_config: Any, **kwargs: Any) -> Any:
        held = precision_config.weight_scale.storage
        before, held.data = held.data, held.data.roll(1, 1)
        try:
            return original(x, w, *args, precision_config=precision_config, **kwargs)
        finally:
            held.data = before

    monkeypatch.setattr(module, "matmul_ogs", rolled)
    result = run_pair(MoECase.from_id(f"{GPT_OSS}-e4k2m3h64i32-balanced"), Entry.LAYER, Backend.INTERPRETER, subject)
    assert result.verdict.outcome is Outcome.MISMATCH


def test_tensors_are_unwrapped_and_nothing_else(interpreter: None) -> None:
    from harness.subject.interpreter.oai_kernels import _plain

    data = torch.ones(2)
    wrapped = SimpleNamespace(storage=SimpleNamespace(data=data), data_ptr=data.data_ptr)
    assert _plain(wrapped) is data
    assert _plain((wrapped, 3))[0] is data
    assert _plain(data) is data
    assert _plain("name") == "name"


def test_closures_are_known(interpreter: None) -> None:
    from harness.subject.interpreter.oai_kernels import fill_closures

    assert not fill_closures()
