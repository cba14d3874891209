"""What every lane rounds otherwise than Triton's modular path does on the same GPU, and that path otherwise than the legacy entry."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from cases.batch import make_batch
from cases.case import Entry, MoECase
from cases.checkpoint import make_checkpoint
from harness.architectures import VARIABLE
from harness.backends import Backend, declared_refusal
from harness.expected import expected
from harness.recipes import recipe
from references.vocabulary import (
    Accumulator,
    ActQuant,
    Epilogue,
    Format,
    Layout,
    Quotient,
    Recipe,
    Rounding,
    RouterWeight,
    W13Merge,
    WeightQuant,
)

Changes = dict[str, object]
HALF, CORE = Format.FP16, Accumulator.TENSOR_CORE
CHANNEL, TENSOR, BLOCK, INT8, FOUR, FP4, W4A8 = (
    "e4m3fn-channel-dyntoken-ct-silu-fp16-e4k2m8h384i128-balanced",
    "e4m3fn-tensor-static-ct-silu-fp16-e4k2m8h384i128-balanced",
    "e4m3fn-block128-dyngroup128-ct-gelu-fp16-e4k2m8h384i128-balanced",
    "int8-channel-dyntoken-ct-silu-fp16-e4k2m8h384i128-balanced",
    "int4-group32-none-ct-silu-fp16-e4k2m8h384i128-balanced",
    "e2m1-group16-none-ct-situ-bf16-e4k2m8h384i128-balanced",
    "int4-group128-dyntoken-ct-silu-bf16-e4k2m8h512i256-balanced",
)


def of(text: str, backend: Backend, entry: Entry = Entry.LAYER) -> Recipe:
    case = MoECase.from_id(text)
    assert declared_refusal(case, entry, backend) is None
    return recipe(case, entry, backend)


def quantizer(how: ActQuant | None) -> ActQuant:
    assert how is not None
    return how


def otherwise(text: str, backend: Backend, entry: Entry = Entry.LAYER) -> Changes:
    """What differs from Triton's layer."""
    base, own = recipe(MoECase.from_id(text), Entry.LAYER, Backend.TRITON), of(text, backend, entry)
    return {each.name: getattr(own, each.name) for each in fields(Recipe) if getattr(own, each.name) != getattr(base, each.name)}


BY_ROW = {
    fmt: ActQuant(format=fmt, layout=Layout.TOKEN, dynamic=True, scale_floor=1e-30, quotient=Quotient.RECIPROCAL)
    for fmt in (Format.E4M3FN, Format.INT8)
}
ONLY_WEIGHTS: Changes = {"a1": None, "a2": None, "compute": (HALF,), "accumulator": CORE}
MARLIN: Changes = ONLY_WEIGHTS | {"name": "marlin", "router_weight": RouterWeight.STORED, "epilogue": Epilogue.BIAS_STORED}
BYTES_ON_MARLIN: Changes = MARLIN | {"weight_scale_store": HALF, "weight_store_one_group": False}
IN_SLICES: Changes = {"router_weight": RouterWeight.SUM, "gate_store": None, "split_store": HALF}
HUMMING: Changes = ONLY_WEIGHTS | IN_SLICES | {"name": "humming"}
BY_CHANNEL: Changes = {"weight_scale_store": HALF, "epilogue": Epilogue.CHANNEL_STORED}
BY_BLOCK: Changes = {"weight_scale_store": HALF, "weight_store": HALF, "epilogue": Epilogue.BIAS_STORED}
OF_ROWS: Changes = {
    "name": "humming-a8",
    "activation_store": Format.FP32,
    "compute": (HALF,),
    "gate_store": None,
    "router_weight": RouterWeight.SUM,
}
FP8_ROWS: Changes = OF_ROWS | {"a1": BY_ROW[Format.E4M3FN], "a2": BY_ROW[Format.E4M3FN], "accumulator": Accumulator.TENSOR_CORE_FP8_ANY}
INT8_ROWS: Changes = OF_ROWS | {"a1": BY_ROW[Format.INT8], "a2": BY_ROW[Format.INT8]}
CUTLASS: Changes = {"name": "cutlass", "compute": (HALF,), "router_weight": RouterWeight.SUM}

OTHERWISE: list[tuple[str, Backend, Changes]] = [
    (CHANNEL, Backend.CUTLASS, CUTLASS),
    (TENSOR, Backend.CUTLASS, CUTLASS),
    (CHANNEL, Backend.MARLIN, BYTES_ON_MARLIN),
    (TENSOR, Backend.MARLIN, BYTES_ON_MARLIN),
    (BLOCK, Backend.MARLIN, BYTES_ON_MARLIN | {"weight_store": HALF}),
    (CHANNEL, Backend.HUMMING, HUMMING | BY_CHANNEL),
    (TENSOR, Backend.HUMMING, HUMMING | {"epilogue": Epilogue.BIAS_STORED}),
    (BLOCK, Backend.HUMMING, HUMMING | BY_BLOCK),
    (BLOCK, Backend.HUMMING_A8, HUMMING | BY_BLOCK | {"name": "humming-a8 (weight-only)"}),
    (INT8, Backend.HUMMING, HUMMING | BY_CHANNEL),
    (CHANNEL, Backend.HUMMING_A8, FP8_ROWS | BY_CHANNEL),
    (INT8, Backend.HUMMING_A8, INT8_ROWS | BY_CHANNEL),
]


@pytest.mark.parametrize(("text", "backend", "what"), OTHERWISE)
def test_each_lane_rounds_what_it_rounds(text: str, backend: Backend, what: Changes, monkeypatch: pytest.MonkeyPatch) -> None:
    """humming divides 384 columns, three K blocks, among four stages; humming-a8 has three, which are enough for them."""
    monkeypatch.setenv(VARIABLE, "sm90")
    assert otherwise(text, backend) == what


def test_quarks_integers_with_static_scales_run_as_on_triton_wherever_they_are_asked() -> None:
    text = "int8-channel-static-quark-silu-fp16-e4k2m8h128i64-balanced"
    assert not any(otherwise(text, backend) for backend in (Backend.MARLIN, Backend.HUMMING, Backend.HUMMING_A8, Backend.CUTLASS))


def test_what_is_not_quantized_runs_as_on_triton_whatever_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sm90")
    text = "bf16-none-none-plain-gelu-bf16-e4k2m8h384i128-balanced"
    assert not any(otherwise(text, backend) for backend in (Backend.MARLIN, Backend.HUMMING, Backend.HUMMING_A8))


def test_numbers_and_intervals_drop_the_same_bits_of_fp32_rows() -> None:
    """Else the reference says that it disagrees with itself."""
    case = MoECase.from_id("fp32-none-none-plain-gelu-fp32-e4k2m8h128i64-balanced")
    how = of(case.id, Backend.TRITON)
    assert how.accumulator is CORE
    answer = expected(case, how, make_checkpoint(case), make_batch(case))
    full = expected(case, replace(how, accumulator=Accumulator.FP32), make_checkpoint(case), make_batch(case))
    assert not bool(((full.low <= answer.expected) & (answer.expected <= full.high)).all())


def test_rows_packed_by_expert() -> None:
    stored = {"name": "triton-batched", "router_weight": RouterWeight.STORED, "router_weight_exact": True, "slots_store": HALF}
    assert otherwise(CHANNEL, Backend.BATCHED_TRITON, Entry.BATCHED) == stored
    coupled = TENSOR.replace("static-ct", "dyntensor-vllmfp8")
    packed, layer = of(coupled, Backend.BATCHED_TRITON, Entry.BATCHED), recipe(MoECase.from_id(coupled), Entry.LAYER, Backend.TRITON)
    assert (quantizer(packed.a1).per_expert, quantizer(layer.a1).per_expert) == (True, False)
    blocks = MoECase.from_id("e4m3fn-block128-dyngroup128-ct-silu-bf16-e4k2m8h128i128-balanced")
    deep = recipe(blocks, Entry.BATCHED, Backend.DEEP_GEMM)
    assert (quantizer(deep.a1).scale_store, quantizer(deep.a2).scale_store) == (Format.FP32, Format.BF16)


def test_a_k_block_that_no_stage_has_divides_gemm_2_too() -> None:
    for backend, columns, divided in ((Backend.HUMMING, 384, True), (Backend.HUMMING, 256, False), (Backend.HUMMING_A8, 256, True)):
        text = CHANNEL.replace("h384i128", f"h128i{columns}")
        assert (of(text, backend).split_store is not None) is divided


def test_the_legacy_entry_computes_in_its_own_dtype_and_weights_sums() -> None:
    text = CHANNEL.replace("k2", "k1").replace("balanced", "balanced-norenorm-onin").replace("-ct-", "-quark-")
    legacy, modular = of(text, Backend.TRITON, Entry.FUSED_EXPERTS), of(text, Backend.TRITON)
    assert (legacy.compute, modular.compute) == ((HALF,), (Format.BF16, HALF))
    assert (legacy.router_weight, modular.router_weight) == (RouterWeight.GEMM1, RouterWeight.INPUT)
    assert (legacy.router_weight_exact, modular.router_weight_exact) == (True, False)


def test_how_a_quotient_is_formed() -> None:
    for text, here, gpu in (
        (INT8, Quotient.AMAX_RATIO, Quotient.ANY),
        (CHANNEL, Quotient.DIVIDE, Quotient.DIVIDE),
        (TENSOR, Quotient.RECIPROCAL, Quotient.RECIPROCAL),
        (BLOCK, Quotient.RECIPROCAL, Quotient.RECIPROCAL),
        (INT8.replace("dyntoken-ct", "static-quark"), Quotient.DIVIDE, Quotient.DIVIDE),
    ):
        case = MoECase.from_id(text)
        for backend, quotient in ((Backend.INTERPRETER, here), (Backend.TRITON, gpu)):
            assert quantizer(recipe(case, Entry.FUSED_EXPERTS, backend).a1).quotient is quotient, (text, backend)


def test_silu_of_blocks_is_quantized_by_an_operator_of_its_own_unless_it_is_limited() -> None:
    silu = BLOCK.replace("gelu", "silu")
    fused, limited = quantizer(of(silu, Backend.INTERPRETER).a2), quantizer(of(f"{silu}-tight", Backend.INTERPRETER).a2)
    assert (fused.quotient, fused.scale_floor) == (Quotient.DIVIDE, 1.0 / (448.0 * 512.0))
    assert limited == quantizer(of(silu, Backend.INTERPRETER).a1)
    assert limited.scale_floor == 1e-10 / 448.0
    batched = recipe(MoECase.from_id(silu), Entry.BATCHED, Backend.BATCHED_TRITON)
    assert (batched.a2, batched.activation_store) == (batched.a1, HALF)


def test_integers_in_blocks_are_scaled_64_columns_at_once_beyond_64_tokens() -> None:
    text = "int8-block128-dyngroup128-raw-silu-bf16-e4k2m{}h256i128-balanced"
    tiles = [recipe(MoECase.from_id(text.format(m)), Entry.FUSED_EXPERTS, Backend.INTERPRETER).scaled_tile for m in (64, 65, 129)]
    assert tiles == [None, 64, 64]


@pytest.mark.parametrize("act", ["dyntoken", "dyntensor"])
def test_integers_with_a_scale_for_all_keep_their_activations(act: str) -> None:
    case = MoECase.from_id(f"int8-tensor-{act}-quark-silu-bf16-e4k2m8h128i64-balanced")
    assert recipe(case, Entry.LAYER, Backend.INTERPRETER).a1 is None
    assert recipe(case, Entry.FUSED_EXPERTS, Backend.INTERPRETER).a1 is not None


def test_halves_are_merged_where_there_are_two() -> None:
    gated, alone = TENSOR, TENSOR.replace("silu", "relu2_no_mul")
    merges = [recipe(MoECase.from_id(text), Entry.LAYER, Backend.INTERPRETER).w13_merge for text in (gated, alone, CHANNEL)]
    assert merges == [W13Merge.REQUANTIZE_TO_MAX, W13Merge.AS_STORED, W13Merge.AS_STORED]


def test_online_blocks() -> None:
    here, gpu = (
        recipe(MoECase.from_id(BLOCK.replace("-ct-", "-online-")), Entry.LAYER, backend).weight_quant
        for backend in (Backend.INTERPRETER, Backend.TRITON)
    )
    floor = 1e-4 / 448.0
    assert here == WeightQuant(format=Format.E4M3FN, layout=Layout.BLOCK128, scale_floor=floor, quotient=Quotient.RECIPROCAL)
    assert gpu == WeightQuant(format=Format.E4M3FN, layout=Layout.BLOCK128, scale_floor=floor, scale_by_reciprocal=True)


def test_deep_gemm_quantizes_the_weights_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sm90")
    text = "e4m3fn-block128-dyngroup128-ct-silu-bf16-e4k2m8h128i128-balanced"
    how = of(text, Backend.DEEP_GEMM)
    assert how.router_weight is RouterWeight.SUM
    assert how.weight_requant == WeightQuant(
        format=Format.E4M3FN,
        layout=Layout.BLOCK128,
        scale_floor=1e-4 / 448.0,
        quotient=Quotient.RECIPROCAL,
        power_of_two=True,
        scale_by_reciprocal=True,
    )


def test_packed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sm90")
    marlin, mixed = of(FOUR, Backend.MARLIN), of(W4A8, Backend.CUTLASS)
    assert (marlin.compute, marlin.gate_store, marlin.weight_store) == ((HALF,), HALF, HALF)
    assert of(FP4, Backend.MARLIN).gate_store is None  # situ is fp32 throughout
    assert (mixed.weight_store, mixed.weight_scale_fp8, mixed.accumulator) == (Format.E4M3FN, True, Accumulator.TENSOR_CORE_FP8)
    assert (mixed.router_weight, quantizer(mixed.a2).quotient) == (RouterWeight.SUM, Quotient.DIVIDE)
    assert of(W4A8, Backend.HUMMING).split_store is Format.BF16  # four K blocks on three stages
    emulated = recipe(MoECase.from_id(FOUR.replace("-ct-", "-gptq-")), Entry.LAYER, Backend.EMULATION)
    assert (emulated.name, emulated.weight_scale_store, emulated.weight_store) == ("int4-emulation", Format.BF16, Format.BF16)
    online = recipe(MoECase.from_id("e2m1-group32-dyngroup32-online-silu-bf16-e4k2m8h256i256-balanced"), Entry.LAYER, Backend.MARLIN)
    assert online.weight_quant == WeightQuant(format=Format.E2M1, layout=Layout.GROUP32, power_of_two=True)


def test_experts_on_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sm90")
    text = "e2m1-group32-none-gptoss-swigluoai-bf16-e4k2m8h128i64-balanced"
    fused, given, unfused = of(text, Backend.TRITON), of(f"{text}-norenorm", Backend.TRITON), of(text, Backend.TRITON_UNFUSED)
    assert [each.first_stored for each in (fused, given, unfused)] == [False, False, True]
    assert [each.router_weight_store for each in (fused, given, unfused)] == [None, Format.BF16, Format.BF16]


def test_int8_rows_round_half_away_and_groups_toward_zero() -> None:
    half_away = quantizer(recipe(MoECase.from_id(INT8), Entry.LAYER, Backend.INTERPRETER).a1)
    groups = MoECase.from_id("int8-block128-dyngroup128-raw-silu-bf16-e4k2m8h256i128-balanced")
    assert (half_away.rounding, half_away.scale_floor) == (Rounding.HALF_AWAY, 1e-10 / 127.0)
    assert quantizer(recipe(groups, Entry.FUSED_EXPERTS, Backend.INTERPRETER).a1).rounding is Rounding.TOWARD_ZERO
