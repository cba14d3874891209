from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from cases.case import ActScale, Data, InvalidCase, Level, MoECase, Origin, Routing
from cases.generate import cases
from references.vocabulary import Activation, CheckpointFormat, Format, Layout

PLAIN = MoECase.from_id("bf16-none-none-plain-silu-bf16-e4k2m8h128i64-balanced")
BLOCK = MoECase.from_id("e4m3fn-block128-dyngroup128-ct-silu-bf16-e4k2m8h128i128-balanced")


def test_every_id_of_every_level_reads_back() -> None:
    for case in cases(Level.DEEP):
        assert MoECase.from_id(case.id) == case


@settings(deadline=None)
@given(
    st.sampled_from(cases(Level.NIGHTLY)),
    st.fixed_dictionaries(
        {},
        optional={
            "experts": st.integers(1, 200),
            "top_k": st.integers(1, 9),
            "tokens": st.integers(1, 300),
            "activation": st.sampled_from(list(Activation)),
            "checkpoint": st.sampled_from(list(CheckpointFormat)),
            "bias": st.booleans(),
            "renormalize": st.booleans(),
            "router_weight_on_input": st.booleans(),
            "routing": st.sampled_from(list(Routing)),
            "seed": st.integers(0, 10**6),
        },
    ),
)
def test_any_valid_case_reads_back(case: MoECase, change: dict[str, object]) -> None:
    try:
        changed = dataclasses.replace(case, **change)  # type: ignore[arg-type]
    except InvalidCase:
        reject()
    assert MoECase.from_id(changed.id) == changed


@pytest.mark.parametrize(
    ("case", "change", "says"),
    [
        (BLOCK, {"intermediate": 192}, "block 128x128 needs I % 128 == 0 in a pre-quantized checkpoint, got 192"),
        (BLOCK, {"act_scale": ActScale.DYNAMIC_TOKEN}, "block128 weights go with activation scale dyngroup128, got dyntoken"),
        (PLAIN, {"top_k": 5}, "top_k must be at most experts, got top_k 5 of 4 experts"),
        (PLAIN, {"tokens": 0}, "tokens must be at least 1, got 0"),
        (PLAIN, {"router_weight_on_input": True}, "router weight on input needs top_k == 1, got 2"),
        (PLAIN, {"weight": Format.FP16}, "unquantized weights have the hidden dtype bf16, got fp16"),
        (PLAIN, {"weight_scale": Layout.TENSOR}, "unquantized layers have no scales"),
        (PLAIN, {"checkpoint": CheckpointFormat.QUARK}, "unquantized weights come from a plain checkpoint, got quark"),
        (PLAIN, {"origin": Origin.ONLINE}, "online quantization knows"),
        (BLOCK, {"weight": Format.INT8}, "int8 block128 exists through the direct entry (raw) only, got ct"),
        (BLOCK, {"checkpoint": CheckpointFormat.PLAIN}, "a plain checkpoint holds no codes"),
        (PLAIN, {"seed": -1}, "seed must be at least 0, got -1"),
        (PLAIN, {"experts": 2**20 + 1}, "experts must be at most 1048576, got 1048577"),
        (PLAIN, {"tokens": 10**30}, "tokens must be at most 1048576, got 1000000000000000000000000000000"),
        (PLAIN, {"seed": 2**63}, "seed must be at most 9223372036854775807, got 9223372036854775808"),
        (PLAIN, {"experts": 2**17, "tokens": 2**17}, "the router logits must have at most 8589934592 elements, got 17179869184"),
        (PLAIN, {"hidden": 2**17, "intermediate": 2**15}, "the weights must have at most 8589934592 elements, got 51539607552"),
        (PLAIN, {"tokens": 2**20, "intermediate": 2**13}, "the intermediate must have at most 8589934592 elements, got 34359738368"),
    ],
)
def test_an_invalid_case_names_the_rule_and_the_value(case: MoECase, change: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidCase) as error:
        dataclasses.replace(case, **change)  # type: ignore[arg-type]
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has 1 of at least"),
        ("int8", "has 1 of at least"),
        (PLAIN.id.replace("bf16-none", "int9-none", 1), "int9"),
        (PLAIN.id.replace("silu", "swish"), "swish"),
        (PLAIN.id.replace("e4k2", "e4q2"), "e4q2"),
        (PLAIN.id.replace("e4k2", "e04k2"), "is not in its one written form"),
        (PLAIN.id + "-bias-bias", "bias"),
        (PLAIN.id + "-wings", "wings"),
        (PLAIN.id + "-s0", "s0"),
        (PLAIN.id.replace("e4k2", f"e{'4' * 5000}k2"), "expected e<E>k<k>m<M>h<H>i<I>"),
        (f"{PLAIN.id}-s{'4' * 5000}", "or s<seed>"),
    ],
)
def test_a_bad_id_names_the_bad_part(text: str, says: str) -> None:
    with pytest.raises(InvalidCase) as error:
        MoECase.from_id(text)
    assert says in str(error.value)


def test_derived_shapes() -> None:
    case = MoECase.from_id("e4m3fn-block128-dyngroup128-ct-silu-bf16-e4k2m8h384i256-balanced")
    assert case.w13_rows == 512
    assert (case.shape("up_proj"), case.shape("down_proj")) == ((256, 384), (384, 256))
    assert (case.scale_shape("up_proj"), case.scale_shape("down_proj")) == ((2, 3), (3, 2))
    assert dataclasses.replace(case, activation=Activation.RELU2_NO_MUL).w13_rows == 256
    assert case.data is Data.DENSE
