"""Which recipe a packed pair gets, lane by lane, and that none that runs is left out."""

from __future__ import annotations

import pytest

from cases.case import Entry, Level, MoECase
from cases.generate import pairs
from cases.packed import is_packed
from harness.architectures import VARIABLE
from harness.backends import Backend, declared_refusal, experts_expected
from harness.recipes import recipe, written
from references.vocabulary import Accumulator, Epilogue, Format, GlobalScale, Quotient, Recipe, RouterWeight

LANES = (Backend.MARLIN, Backend.HUMMING, Backend.HUMMING_A8, Backend.CUTLASS, Backend.EMULATION)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sm90")


def how(case: str, backend: Backend) -> Recipe:
    return recipe(MoECase.from_id(case), Entry.LAYER, backend)


@pytest.mark.parametrize("backend", LANES)
def test_every_claimed_pair_has_a_recipe(backend: Backend) -> None:
    claimed = [
        case
        for case, entry in pairs(Level.NIGHTLY)
        if entry is Entry.LAYER and is_packed(case) and declared_refusal(case, entry, backend) is None
    ]
    assert len(claimed) >= 18
    for case in claimed:
        if experts_expected(case, Entry.LAYER, backend) != {"OCP_MXQuantizationEmulationTritonExperts"}:  # Marlin runs: in the ledger
            assert written(case, Entry.LAYER, backend), case.id
            assert recipe(case, Entry.LAYER, backend).output is case.dtype


def test_marlins_scale_of_all_of_k_meets_what_its_width_says() -> None:
    four = how("int4-group128-none-ct-silu-bf16-e4k2m8h128i128-balanced", Backend.MARLIN)
    eight = how("int8-group128-none-ct-silu-bf16-e4k2m8h128i128-balanced", Backend.MARLIN)
    padded = how("int4-group32-none-ct-silu-bf16-e4k2m8h128i32-balanced", Backend.MARLIN)
    assert (four.epilogue, four.weight_store_one_group) == (Epilogue.CHANNEL_THEN_BIAS, False)
    assert (eight.epilogue, eight.weight_store_one_group) == (Epilogue.BIAS_STORED, False)
    assert padded.weight_store_one_group


def test_marlins_global_scale_goes_with_the_router_weight_unless_that_is_on_the_input() -> None:
    plain = how("e2m1-group16-none-ct-silu-bf16-e4k2m8h128i64-balanced", Backend.MARLIN)
    on_input = how("e2m1-group16-none-modelopt-gelu_tanh-bf16-e4k1m17h64i32-balanced-norenorm-onin", Backend.MARLIN)
    assert (plain.global_scale, plain.router_weight) == (GlobalScale.ROUTER, RouterWeight.STORED)
    assert (on_input.global_scale, on_input.router_weight) == (GlobalScale.SUMS, RouterWeight.INPUT)


def test_humming_quantizes_activations_where_it_may_not_choose() -> None:
    w4a8 = "int4-group128-dyntoken-ct-silu-bf16-e4k2m8h256i256-balanced"
    int8 = "int8-group128-none-ct-silu-bf16-e4k2m8h128i128-balanced"
    assert how(w4a8, Backend.HUMMING).accumulator is Accumulator.TENSOR_CORE_FP8_ANY
    assert how(int8, Backend.HUMMING).a1 is None
    quantized = how(int8, Backend.HUMMING_A8)
    assert quantized.a1 is not None
    assert (quantized.a1.format, quantized.accumulator, quantized.weight_store) == (Format.INT8, Accumulator.INT32, None)
    assert how("int4-group128-none-ct-silu-bf16-e4k2m8h128i128-balanced", Backend.HUMMING_A8).a1 is None


def test_layers_of_moe_wna16_keep_16_bit_activations_on_humming_a8() -> None:
    """Seen on an H200: int8-group32 GPTQ of 96 by 160, whose output is the weight-only one to the last bit."""
    by_marlins_sizes, others = (
        "int8-group32-none-gptq-silu-bf16-e4k2m8h128i64-balanced",
        "int8-group32-none-gptq-silu-bf16-e3k1m129h96i160-single",
    )
    own, handed_on = (recipe(MoECase.from_id(each), Entry.LAYER, Backend.HUMMING_A8) for each in (by_marlins_sizes, others))
    assert own.a1 is not None
    assert own.a1.format is Format.INT8
    assert handed_on == recipe(MoECase.from_id(others), Entry.LAYER, Backend.HUMMING)


def test_the_emulation_divides_approximately_on_a_gpu_only() -> None:
    case = "e2m1-group16-dyngroup16-ct-silu-bf16-e4k2m8h128i64-balanced"
    for backend, quotient in ((Backend.EMULATION, Quotient.ANY), (Backend.TRITON, Quotient.ANY), (Backend.INTERPRETER, Quotient.DIVIDE)):
        act = how(case, backend).a1
        assert act is not None
        assert act.quotient is quotient
