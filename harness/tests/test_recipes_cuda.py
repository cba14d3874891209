"""Recipes of the CUDA lanes that are not packed: what is rounded where, GPU by GPU."""

from __future__ import annotations

import pytest

from cases.case import Entry, MoECase
from harness.architectures import VARIABLE
from harness.backends import Backend, claimed, declared_refusal, experts_expected
from harness.recipes import recipe, written
from references.vocabulary import Format, Recipe

BLOCK = "e4m3fn-block128-dyngroup128-ct-{}-bf16-e4k2m8h128i128-balanced{}"


def deep_gemm(activation: str, tail: str = "") -> Recipe:
    case = MoECase.from_id(BLOCK.format(activation, tail))
    assert claimed(case, Entry.LAYER, Backend.DEEP_GEMM)
    return recipe(case, Entry.LAYER, Backend.DEEP_GEMM)


@pytest.mark.parametrize("tail", ["", "-tight"])
def test_deep_gemm_on_hopper_stores_both_factors_of_a_fused_product(tail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sm90")
    silu, oai = deep_gemm("silu", tail), deep_gemm("swigluoai_uninterleave", tail)
    assert silu.gate_store is oai.gate_store is silu.activation_store is oai.activation_store is Format.BF16
    assert oai.swiglu is not None
    assert oai.swiglu.up_store is Format.BF16


def test_deep_gemm_on_blackwell_stores_the_product_alone_and_floors_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sm90")
    on_hopper = deep_gemm("swigluoai_uninterleave")
    monkeypatch.setenv(VARIABLE, "sm100")
    oai, stepped = deep_gemm("swigluoai_uninterleave"), deep_gemm("swiglustep")
    assert (oai.gate_store, oai.activation_store) == (None, Format.BF16)
    assert oai.swiglu is not None
    assert oai.swiglu.up_store is None
    assert oai.a2 is not None
    assert stepped.a2 is not None
    assert on_hopper.a2 is not None
    assert oai.a2.scale_floor == 448.0 * on_hopper.a2.scale_floor
    assert stepped.a2.scale_floor == oai.a2.scale_floor
    assert on_hopper.a1 is not None
    assert on_hopper.a1.scale_floor == oai.a2.scale_floor


def test_deep_gemm_does_not_fuse_swiglustep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sm90")
    stepped = deep_gemm("swiglustep")
    assert (stepped.gate_store, stepped.activation_store) == (None, Format.BF16)
    assert stepped.swiglu is not None
    assert stepped.swiglu.up_store is None


@pytest.mark.parametrize(("architecture", "tokens", "triton"), [("sm90", 8, False), ("sm100", 8, True), ("sm100", 9, False)])
def test_cutlass_leaves_few_tokens_to_triton_on_blackwell(
    architecture: str, tokens: int, triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, architecture)
    case = MoECase.from_id(f"e4m3fn-channel-dyntoken-ct-silu-bf16-e4k2m{tokens}h128i128-balanced")
    wanted = {"TritonExperts"} if triton else {"CutlassExpertsFp8"}
    assert experts_expected(case, Entry.LAYER, Backend.CUTLASS) == wanted
    assert recipe(case, Entry.LAYER, Backend.CUTLASS).name == ("triton-modular" if triton else "cutlass")


def test_no_reference_is_written_for_kernels_that_nobody_has_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sm100")
    plain = MoECase.from_id("bf16-none-none-plain-silu-bf16-e4k2m8h128i128-balanced")
    static = MoECase.from_id("e4m3fn-tensor-static-ct-silu-bf16-e4k2m8h128i128-balanced")
    for case, backend in ((plain, Backend.MARLIN), (static, Backend.FLASHINFER_CUTLASS), (static, Backend.FLASHINFER_TRTLLM)):
        assert claimed(case, Entry.LAYER, backend)
        assert not written(case, Entry.LAYER, backend)
    assert written(static, Entry.LAYER, Backend.TRITON)
    monkeypatch.setenv(VARIABLE, "sm90")
    assert written(plain, Entry.LAYER, Backend.MARLIN)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "situ", "silu_no_mul"])
def test_deep_gemm_refuses_every_other_activation(activation: str) -> None:
    case = MoECase.from_id(BLOCK.format(activation, ""))
    assert declared_refusal(case, Entry.LAYER, Backend.DEEP_GEMM) is not None


@pytest.mark.parametrize("backend", [Backend.MARLIN, Backend.HUMMING, Backend.FLASHINFER_TRTLLM])
def test_the_default_on_blackwell_does_not_look_at_the_dtype(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    case = MoECase.from_id("fp16-none-none-plain-silu-fp16-e4k2m8h128i64-balanced")
    monkeypatch.setenv(VARIABLE, "sm100")
    refusal = declared_refusal(case, Entry.LAYER, backend)
    assert refusal is not None
    assert refusal.matches("ValueError: Unquantized Moe Backend FlashInfer TRTLLM requires bfloat16 weights")
    monkeypatch.setenv(VARIABLE, "sm90")
    assert (declared_refusal(case, Entry.LAYER, backend) is None) == (backend is not Backend.FLASHINFER_TRTLLM)
