from __future__ import annotations

import dataclasses
import itertools
import json
from functools import cache

import pytest
import torch

from cases import packed
from cases.axes import ActScale, InvalidCase, Origin, Routing
from cases.case import Level, MoECase
from cases.checkpoint import make_checkpoint
from cases.configs import quantization_config
from cases.dense import dense_experts
from cases.generate import PACKED_SCHEMES, pairs
from cases.roles import zero_expert
from references.checkpoint import read_experts
from references.moe import Expert, Projection
from references.vocabulary import CheckpointFormat, Format, Layout

NIGHTLY = tuple(dict.fromkeys(case for case, _ in pairs(Level.NIGHTLY) if packed.is_packed(case)))
STORED = [case for case in NIGHTLY if case.origin is Origin.PREQUANTIZED]
BY_SCHEME = {(case.weight, case.weight_scale, case.act_scale, case.checkpoint, case.activation.gated, case.bias): case for case in STORED}
ids = lambda case: case.id  # noqa: E731


@cache
def experts_of(case: MoECase) -> tuple[Expert, ...]:
    return dense_experts(case)


def projections(expert: Expert) -> list[Projection]:
    return [p for p in (expert.gate, expert.up, expert.down) if p is not None]


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).contiguous().view(torch.uint8)


def same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.shape == right.shape and torch.equal(as_bytes(left), as_bytes(right))


def check_round_trip(case: MoECase, tensors: dict[str, torch.Tensor]) -> None:
    read = read_experts(
        tensors,
        checkpoint=case.checkpoint,
        experts=case.experts,
        gated=case.activation.gated,
        weight=case.weight,
        layout=case.weight_scale,
    )
    for made, found in zip(experts_of(case), read, strict=True):
        assert (made.gate is None) is (found.gate is None)
        for left, right in zip(projections(made), projections(found), strict=True):
            for field in ("codes", "scale", "zero_point", "global_scale", "input_scale", "bias"):
                assert same(getattr(left, field), getattr(right, field)), field


@pytest.mark.parametrize("case", BY_SCHEME.values(), ids=ids)
def test_what_is_written_reads_back(case: MoECase) -> None:
    check_round_trip(case, make_checkpoint(case).tensors)


@pytest.mark.parametrize("case", [case for key, case in BY_SCHEME.items() if key[4:] == (True, False)], ids=ids)
def test_a_tensor_in_anothers_place_does_not_read_back(case: MoECase) -> None:
    case = dataclasses.replace(case, experts=1, top_k=1, routing=Routing.BALANCED)
    tensors = make_checkpoint(case).tensors
    for name, tensor in tensors.items():
        if name.endswith(("g_idx", "weight_shape")):
            continue
        if case.weight in (Format.INT4, Format.INT8) and name.endswith("qzeros"):  # of symmetric files, all alike
            continue
        flat = as_bytes(tensor).clone()
        flat[-1] ^= 1
        with pytest.raises((AssertionError, ValueError)):
            check_round_trip(case, {**tensors, name: flat.view(tensor.dtype).reshape(tensor.shape)})


@pytest.mark.parametrize("case", BY_SCHEME.values(), ids=ids)
def test_every_code_is_in_play_and_neighbouring_scales_differ(case: MoECase) -> None:
    experts = [expert for index, expert in enumerate(experts_of(case)) if index != zero_expert(case)]
    codes = torch.cat([p.codes.reshape(-1).view(torch.uint8) for expert in experts for p in projections(expert)])
    count = {Format.INT4: 15, Format.UINT4: 16, Format.E2M1: 16, Format.INT8: 255, Format.UINT8: 256, Format.E4M3FN: 254}[case.weight]
    assert codes.unique().numel() == count
    for expert in experts:
        for p in projections(expert):
            assert p.scale is not None
            for values in (p.scale, p.zero_point):
                if values is None:
                    continue
                assert bool((values[1:] != values[:-1]).all()), "rows"
                assert bool((values[:, 1:] != values[:, :-1]).all()), "groups"
        if expert.gate is not None and expert.gate.scale is not None and expert.up.scale is not None:
            share = (expert.gate.scale == expert.up.scale).double().mean()
            assert float(share) <= (0.06 if case.weight in packed.INTEGERS else 0.0), "halves"
            if expert.gate.zero_point is not None and expert.up.zero_point is not None:
                assert bool((expert.gate.zero_point != expert.up.zero_point).all())
    for left, right in itertools.pairwise(experts):
        assert left.down.scale is not None
        assert right.down.scale is not None
        assert float((left.down.scale == right.down.scale).double().mean()) < 0.3, "experts"


def test_one_scale_is_tiny() -> None:
    for text in ("e2m1-group32-none-ct", "e2m1-group16-dyngroup16-ct", "int4-group32-none-ct"):
        scale = dense_experts(MoECase.from_id(f"{text}-silu-fp16-e4k2m8h128i64-balanced"))[-1].up.scale
        assert scale is not None
        assert int((scale < scale.median() / 64).sum()) == 1


def test_scales_of_integers_are_numbers_of_either_half_dtype() -> None:
    for case in BY_SCHEME.values():
        if case.weight in packed.INTEGERS:
            for p in projections(dense_experts(case)[0]):
                assert p.scale is not None
                assert torch.equal(p.scale.to(torch.bfloat16).float(), p.scale)
                assert torch.equal(p.scale.to(torch.float16).float(), p.scale)


def test_one_numbers_in_every_file_that_holds_them() -> None:
    for (weight, layout, act), files in packed.SCHEMES.items():
        found = []
        for stored in sorted(files - {CheckpointFormat.RAW}):
            activation = "swigluoai" if stored is CheckpointFormat.GPT_OSS else "silu"
            case = MoECase.from_id(f"{weight}-{layout}-{act}-{stored}-{activation}-bf16-e3k2m8h256i256-balanced")
            found.append(dense_experts(case))
        for other in found[1:]:
            for left, right in zip(found[0], other, strict=True):
                assert same(left.up.codes, right.up.codes)
                assert same(left.down.scale, right.down.scale)
                assert same(left.down.global_scale, right.down.global_scale)


def test_all_schemes_are_in_nightly_and_have_a_config() -> None:
    found = {(case.weight, case.weight_scale, case.act_scale, case.checkpoint, case.origin) for case, _ in pairs(Level.NIGHTLY)}
    assert {tuple(scheme) for scheme in PACKED_SCHEMES} <= found
    for case in STORED:
        config = quantization_config(case)
        assert config is not None
        assert json.loads(json.dumps(config)) == config


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("int4-group32-none-awq", "is held by ct, gptq checkpoints, got awq"),
        ("uint4-group16-none-ct", "no checkpoint holds uint4 weights with weight scale group16"),
        ("e2m1-group32-none-modelopt", "is held by ct, gptoss, quark checkpoints, got modelopt"),
        ("int4-group128-none-ct", "int4 group128 needs I % 128 == 0, got 96"),
        ("int4-group128-dyntoken-ct", "needs H % 256 == 0, got 128"),
    ],
)
def test_what_no_file_holds_is_named(text: str, says: str) -> None:
    with pytest.raises(InvalidCase) as error:
        MoECase.from_id(f"{text}-silu-bf16-e4k2m8h128i96-balanced")
    assert says in str(error.value)


def test_microscaled_layers_take_halves() -> None:
    case = MoECase.from_id("e2m1-group32-none-gptoss-swigluoai-bf16-e4k2m8h128i64-balanced")
    with pytest.raises(InvalidCase, match="gptoss checkpoints take bf16"):
        dataclasses.replace(case, dtype=Format.FP16)
    assert case.act_scale is ActScale.NONE
    assert case.weight_scale is Layout.GROUP32
