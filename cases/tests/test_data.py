from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from cases.batch import make_batch, zero_row
from cases.case import Level, MoECase, Origin, Routing
from cases.checkpoint import Checkpoint, make_checkpoint
from cases.dense import dense_experts
from cases.generate import cases
from cases.packed import is_packed
from cases.roles import empty_expert, layer_key, zero_expert
from references.routing import route
from references.vocabulary import CheckpointFormat, Layout

SMOKE = cases(Level.SMOKE)
QUANTIZED = [case for case in SMOKE if case.origin is Origin.PREQUANTIZED and not is_packed(case)]  # the others: test_packed.py
ids = lambda case: case.id  # noqa: E731


@cache
def checkpoint(case: MoECase) -> Checkpoint:
    return make_checkpoint(case)


def scales(case: MoECase, ending: str = ".weight_scale") -> dict[str, torch.Tensor]:
    tensors = checkpoint(case).tensors
    return {name: value for name, value in tensors.items() if name.endswith((ending, f"{ending}_inv"))}


@pytest.mark.parametrize("case", QUANTIZED, ids=ids)
def test_every_scale_value_is_distinct_and_no_order_hides_an_index(case: MoECase) -> None:
    found = scales(case)
    values = torch.cat([value.flatten() for value in found.values()])
    assert values.unique().numel() == values.numel()
    assert bool((values > 0).all())
    if values.numel() > 4:
        assert not torch.equal(values, values.sort().values)
    mantissas = torch.frexp(values).mantissa
    assert bool((mantissas != 0.5).any()), "powers of two only: rounding would be invisible"


GATED_LAYERS = {
    layer_key(case): case
    for case in cases(Level.NIGHTLY)
    if case.origin is Origin.PREQUANTIZED and case.activation.gated and not is_packed(case)
}


@pytest.mark.parametrize("case", GATED_LAYERS.values(), ids=ids)
def test_gate_and_up_scales_differ_clearly(case: MoECase) -> None:
    for expert in dense_experts(case):
        assert expert.gate is not None
        assert expert.gate.scale is not None
        assert expert.up.scale is not None
        ratio = float(expert.gate.scale.double().mean() / expert.up.scale.double().mean())
        assert max(ratio, 1 / ratio) > 1.15  # 1.3 to 4 by design, over the spread of the channels


@pytest.mark.parametrize("case", [case for case in QUANTIZED if case.static_input], ids=ids)
def test_static_input_scales_are_distinct_over_experts(case: MoECase) -> None:
    found = scales(case, ".input_scale")
    for projection in ("up_proj", "down_proj"):
        values = torch.stack([v.reshape(()) for n, v in found.items() if f".{projection}." in n])
        assert values.unique().numel() == case.experts


@pytest.mark.parametrize("case", SMOKE, ids=ids)
def test_routing_is_what_the_pattern_says(case: MoECase) -> None:
    batch = make_batch(case)
    routing = route(batch.router_logits, case.top_k, case.renormalize)
    counts = torch.bincount(routing.topk_ids.flatten(), minlength=case.experts)
    empty = empty_expert(case)
    assert empty is None or int(counts[empty]) == 0
    if case.routing is Routing.ONE_EACH:
        assert int(counts[-1]) == 1
    if case.routing is Routing.SINGLE:
        assert int((counts > 0).sum()) == case.top_k
    if case.top_k < case.experts:
        ordered = batch.router_logits.double().sort(-1, descending=True).values
        assert float((ordered[:, case.top_k - 1] - ordered[:, case.top_k]).min()) > 2**-10


@pytest.mark.parametrize("case", SMOKE, ids=ids)
def test_rows_and_edges_are_in_play(case: MoECase) -> None:
    x = make_batch(case).hidden_states.double()
    row = zero_row(case)
    alive = torch.ones(case.tokens, dtype=torch.bool)
    if row is not None:
        assert not bool(x[row].any())
        alive[row] = False
    assert bool((x[alive][:, [0, -1]] != 0).all())
    if int(alive.sum()) > 4:
        rms = x[alive].square().mean(-1).sqrt()
        assert float(rms.max() / rms.min()) > 2


def test_an_all_zero_expert_is_somewhere_routed_to() -> None:
    found = [
        case
        for case in SMOKE
        if not is_packed(case)
        and not case.activation.interleaved
        and (zero := zero_expert(case)) is not None
        and bool((route(make_batch(case).router_logits, case.top_k, True).topk_ids == zero).any())
        and not bool(checkpoint(case).tensors[f"{zero}.down_proj.weight"].float().any())
    ]
    assert len(found) > 20


def test_one_numbers_in_every_file_format() -> None:
    base = MoECase.from_id("e4m3fn-channel-dyntoken-ct-silu-bf16-e4k2m8h128i64-balanced")
    ct, quark, raw = (
        make_checkpoint(dataclasses.replace(base, checkpoint=form)).tensors
        for form in (CheckpointFormat.COMPRESSED_TENSORS, CheckpointFormat.QUARK, CheckpointFormat.RAW)
    )
    assert ct.keys() == quark.keys() == raw.keys()
    for name in ct:
        for other in (quark, raw):
            assert torch.equal(ct[name].flatten().view(torch.uint8), other[name].flatten().view(torch.uint8)), name


@pytest.mark.parametrize("case", [SMOKE[0], SMOKE[len(SMOKE) // 2], SMOKE[-1]], ids=ids)
def test_bytes_do_not_depend_on_threads(case: MoECase) -> None:
    threads = torch.get_num_threads()
    try:
        made = []
        for count in (1, 3):
            torch.set_num_threads(count)
            made.append({**make_checkpoint(case).tensors, "x": make_batch(case).hidden_states, "l": make_batch(case).router_logits})
    finally:
        torch.set_num_threads(threads)
    for name, value in made[0].items():
        assert torch.equal(value.contiguous().flatten().view(torch.uint8), made[1][name].contiguous().flatten().view(torch.uint8)), name


def test_names_and_shapes_on_disk() -> None:
    for form, layout, ending, shape in (
        ("ct", Layout.CHANNEL, "weight_scale", (64, 1)),
        ("quark", Layout.CHANNEL, "weight_scale", (64,)),
        ("ct", Layout.TENSOR, "weight_scale", (1,)),
    ):
        act = "dyntoken" if layout is Layout.CHANNEL else "static"
        case = MoECase.from_id(f"e4m3fn-{layout}-{act}-{form}-silu-bf16-e4k2m8h128i64-balanced")
        assert tuple(make_checkpoint(case).tensors[f"3.up_proj.{ending}"].shape) == shape
    block = MoECase.from_id("e4m3fn-block128-dyngroup128-vllmfp8-relu2_no_mul-bf16-e3k2m17h384i256-balanced")
    tensors = make_checkpoint(block).tensors
    assert tuple(tensors["0.up_proj.weight_scale_inv"].shape) == (2, 3)
    assert not any("gate_proj" in name for name in tensors)
