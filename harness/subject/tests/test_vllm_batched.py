"""The batched entry: what ran, what is refused, and that rows which no token fills do not show."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cases.batch import make_batch
from cases.case import Entry, MoECase
from cases.checkpoint import make_checkpoint
from harness.backends import Backend, declared_refusal
from harness.pipeline import run_pair
from harness.subject import LoadFailed, SubjectUnavailable, vllm_batched, vllm_compat
from harness.verdict import Outcome

if TYPE_CHECKING:
    from harness.subject.vllm_layer import VllmSubject

pytestmark = pytest.mark.vllm
SMALL, BLOCKS = "e4k2m8h128i64-balanced", "e4k2m8h256i256-balanced"
EXPERTS = "vllm.model_executor.layers.fused_moe.experts.fused_batched_moe"
RUNS = [
    (f"bf16-none-none-plain-silu-bf16-{SMALL}", "bfloat16"),
    (f"fp16-none-none-plain-gelu_no_mul-fp16-{SMALL}", "float16"),
    (f"e4m3fn-tensor-dyntensor-raw-silu-fp16-{SMALL}", "float8_e4m3fn"),
    (f"e4m3fn-channel-dyntoken-raw-relu2_no_mul-bf16-{SMALL}-norenorm", "float8_e4m3fn"),
]


@pytest.mark.parametrize(("text", "dtype"), RUNS, ids=[text for text, _ in RUNS])
def test_batched_experts_ran(subject: VllmSubject, text: str, dtype: str) -> None:
    case = MoECase.from_id(text)
    loaded = subject.load(case, Entry.BATCHED, make_checkpoint(case))
    ran = subject.run(loaded, make_batch(case))
    assert (loaded.quant_method, loaded.experts_class, ran.experts_class) == (
        "BatchedPrepareAndFinalize",
        "BatchedTritonExperts",
        "BatchedTritonExperts",
    )
    assert ran.gemm_dtypes == (dtype, dtype)
    assert ran.output.shape == (case.tokens, case.hidden)
    assert bool(torch.isfinite(ran.output).all())


@pytest.mark.parametrize(
    "scheme",
    ["int8-channel-dyntoken", "int8-tensor-static", "int8-block128-dyngroup128", "e4m3fn-channel-static", "e4m3fn-channel-dyntensor"],
)
def test_refused_in_vllms_words(subject: VllmSubject, scheme: str) -> None:
    case = MoECase.from_id(f"{scheme}-raw-silu-bf16-{BLOCKS if 'block' in scheme else SMALL}")
    declared = declared_refusal(case, Entry.BATCHED, Backend.BATCHED_TRITON)
    assert declared is not None
    with pytest.raises(LoadFailed) as failed:
        subject.load(case, Entry.BATCHED, make_checkpoint(case))
    assert failed.value.refused
    assert declared.matches(failed.value.detail)


@pytest.mark.parametrize("lacking", ["BatchedDeepGemmExperts", "DeepGEMM weights", "batched rows"])
def test_a_vllm_without_what_the_entry_needs_is_told(subject: VllmSubject, lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = vllm_compat.probe_surface()
    surface = replace(whole, found={name: value for name, value in whole.found.items() if name != lacking})
    monkeypatch.setattr(vllm_compat, "probe_surface", lambda: surface)
    case = MoECase.from_id("e4m3fn-block128-dyngroup128-raw-silu-bf16-e4k2m8h256i256-balanced")
    with pytest.raises(SubjectUnavailable, match=f"has no {lacking}: leave out --entry batched"):
        vllm_batched.load(case, make_checkpoint(case), "cpu", "deep_gemm")


def test_what_an_older_torch_lacks_is_asked_of_torch_cuda_while_a_kernel_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def original() -> bool:
        raise AttributeError("'torch.Stream' object has no attribute 'is_capturing'")

    cuda = SimpleNamespace(is_available=lambda: True, is_current_stream_capturing=lambda: True)
    older = SimpleNamespace(Stream=object, cuda=cuda, compiler=SimpleNamespace(is_compiling=lambda: False))
    module = SimpleNamespace(_is_capturing_or_compiling=original)
    monkeypatch.setattr(vllm_batched, "torch", older)
    with vllm_batched._knowing_capture(module):
        assert module._is_capturing_or_compiling()
    assert module._is_capturing_or_compiling is original
    older.Stream = torch.Stream
    with vllm_batched._knowing_capture(module):
        assert (module._is_capturing_or_compiling is original) == hasattr(torch.Stream, "is_capturing")


@pytest.mark.parametrize("routing", ["balanced", "single"])
@pytest.mark.parametrize("tokens", [1, 33, 128, 129])
def test_there_is_room_for_whole_tiles_of_deep_gemm_only(tokens: int, routing: str) -> None:
    case = MoECase.from_id(f"e4m3fn-block128-dyngroup128-raw-silu-bf16-e4k2m{tokens}h128i128-{routing}")
    tiles, rows = (vllm_batched._capacity(case, name) for name in ("BatchedDeepGemmExperts", "BatchedTritonExperts"))
    assert tiles % 128 == 0
    assert tokens <= rows <= tiles < rows + 128
    assert (rows == tokens) == (routing == "single")


@pytest.mark.parametrize("routing", ["balanced", "single"])
def test_a_kernel_that_is_one_row_off_reads_nan_where_there_is_room_for_it(
    subject: VllmSubject, routing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = MoECase.from_id(f"bf16-none-none-plain-silu-bf16-e4k2m8h128i64-{routing}")
    assert run_pair(case, Entry.BATCHED, Backend.INTERPRETER, subject).verdict.outcome is Outcome.PASS
    module = importlib.import_module(EXPERTS)
    original = module.invoke_moe_batched_triton_kernel

    def off(A: torch.Tensor, **kwargs: Any) -> None:
        first = A.shape[2] == case.hidden
        original(A=A.view(torch.uint8).roll(-1, 1).view(A.dtype) if first else A, **kwargs)

    monkeypatch.setattr(module, "invoke_moe_batched_triton_kernel", off)
    verdict = run_pair(case, Entry.BATCHED, Backend.INTERPRETER, subject).verdict
    assert verdict.outcome is Outcome.MISMATCH
    output = subject.run(subject.load(case, Entry.BATCHED, make_checkpoint(case)), make_batch(case)).output
    assert bool(output.isnan().any()) == (routing == "balanced")  # single: an expert's rows fill all there is room for
