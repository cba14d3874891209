"""Relations between two ways of saying the same numbers: checkpoint formats, online quantization, router weights, views of scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from cases.axes import ActScale, InvalidCase, Origin
from cases.case import Entry
from cases.checkpoint import write
from cases.perturb import scale_grid
from harness import expected
from harness.relations import Place, other_formats
from harness.relations_check import Setting, Variant
from harness.subject.views import Shape, Strides, View, levels
from references.formats import decode, encode
from references.moe import Expert, Projection
from references.quantize import Quantized, quantize_weights
from references.vocabulary import CheckpointFormat, Format, Layout, WeightQuant

_UP, _DOWN = "up_proj", "down_proj"
_LN_3 = 1.0986123
_PLAIN_STRIDES = (Strides.CONTIGUOUS, Strides.SECOND, Strides.EXPANDED)
_N_STRIDES = (Strides.CONTIGUOUS, Strides.SECOND, Strides.TRANSPOSED, Strides.ALONG_N, Strides.EXPANDED)
_STRIDES: dict[Shape, tuple[Strides, ...]] = {
    **dict.fromkeys(Shape, _PLAIN_STRIDES),
    **dict.fromkeys((Shape.E_N, Shape.E_N_1), _N_STRIDES),
    Shape.E_R_C: (Strides.CONTIGUOUS, Strides.SECOND, Strides.TRANSPOSED, Strides.EXPANDED),
}
_ONE_EACH = (Shape.E, Shape.E_1, Shape.E_1_1)
_W_SHAPES = {  # the first, contiguous, is what harness/subject/vllm_direct.py hands over itself
    Layout.TENSOR: (*_ONE_EACH, Shape.E_N, Shape.E_N_1),
    Layout.CHANNEL: (Shape.E_N_1, Shape.E_N),
    Layout.BLOCK128: (Shape.E_R_C,),
}
_A_SHAPES = (Shape.ONE, Shape.SCALAR, Shape.ONE_ONE, *_ONE_EACH)


def other_format(setting: Setting) -> Iterator[Variant]:
    """The same layer written in every other format that the entry takes and that runs by the same recipe."""
    for case in other_formats(Place.of(setting.case, setting.entry, setting.backend)):
        there = Setting.of(case, setting.entry, setting.backend)
        yield Variant(change=f"the same numbers as a {case.checkpoint} checkpoint", setting=replace(there, batch=setting.batch))


def online_as_prequantized(setting: Setting) -> Iterator[Variant]:
    """The checkpoint quantized by the reference, in a format that holds the result; INT8 weights through the functional entry."""
    case, how = setting.case, setting.recipe.weight_quant
    assert how is not None
    stored, entry, act_scale = {
        Layout.TENSOR: (CheckpointFormat.VLLM_FP8, Entry.LAYER, ActScale.DYNAMIC_TENSOR),
        Layout.BLOCK128: (CheckpointFormat.VLLM_FP8, Entry.LAYER, ActScale.DYNAMIC_GROUP128),
        Layout.CHANNEL: (CheckpointFormat.COMPRESSED_TENSORS, Entry.LAYER, ActScale.DYNAMIC_TOKEN),
    }[case.weight_scale]
    batch = setting.batch
    if case.weight is Format.INT8:
        stored, entry, act_scale = CheckpointFormat.RAW, Entry.FUSED_EXPERTS, ActScale.NONE
        batch = replace(batch, topk_weights=setting.routing.topk_weights.float(), topk_ids=setting.routing.topk_ids)
    quantized = replace(case, origin=Origin.PREQUANTIZED, checkpoint=stored, act_scale=act_scale)
    experts = tuple(_quantized(expert, how) for expert in expected.experts(case, setting.checkpoint))
    yield Variant(
        change=f"quantized by the reference and loaded as a {stored} checkpoint through {entry}",
        setting=replace(setting, case=quantized, entry=entry, checkpoint=write(quantized, experts), batch=batch),
    )


def weight_on_input(setting: Setting) -> Iterator[Variant]:
    """Router weights of 1 and hidden states already multiplied. The layer's router is made to give 3/4, which bf16 and fp16 hold."""
    batch = setting.batch
    if setting.entry is Entry.FUSED_EXPERTS:
        assert batch.topk_weights is not None
        scaled = (batch.hidden_states.float() * batch.topk_weights).to(batch.hidden_states.dtype)
        there = replace(batch, hidden_states=scaled, topk_weights=torch.ones_like(batch.topk_weights))
        yield Variant(change="hidden states times the router weights, which become 1", setting=replace(setting, batch=there))
        return
    chosen = setting.routing.topk_ids
    second = (chosen + 1) % setting.case.experts
    logits = batch.router_logits.scatter(1, second, -_LN_3)
    start = replace(setting, batch=replace(batch, router_logits=logits), proven=False)
    scaled = (batch.hidden_states.float() * 0.75).to(batch.hidden_states.dtype)
    there = replace(batch, hidden_states=scaled)
    yield Variant(
        change="hidden states times the router weight 3/4, which becomes 1",
        setting=replace(setting, batch=there, proven=False),
        start=start,
    )


def scale_views(setting: Setting) -> Iterator[Variant]:
    """Each scale tensor in each other form that holds the same numbers, or numbers made equal where strides of 0 need that."""
    case = setting.case
    for name in ("w1_scale", "w2_scale"):
        halves = 2 if name == "w1_scale" and case.activation.gated else 1
        rows, columns = scale_grid(case, _DOWN if name == "w2_scale" else _UP)
        for how in views_of(_W_SHAPES[case.weight_scale]):
            one_row = case.weight_scale is Layout.BLOCK128 and 1 in (halves * rows, columns)
            if how.strides is Strides.TRANSPOSED and (one_row or case.experts == 1):  # nothing to transpose
                continue
            yield _viewed(setting, name, how)
    for name in ("a1_scale", "a2_scale") if case.static_input else ():
        for how in views_of(_A_SHAPES):
            yield _viewed(setting, name, how)


def views_of(shapes: tuple[Shape, ...]) -> list[View]:
    """Every form with one of these shapes but the first, contiguous: that is what any form is compared with."""
    return [View(shape, strides) for shape in shapes for strides in _STRIDES[shape]][1:]


def _viewed(setting: Setting, name: str, how: View) -> Variant:
    same = setting.case.weight_scale is Layout.TENSOR and how.strides is Strides.ALONG_N  # equal along N as they are
    start = {name: how.start} if levels(how) and not same else {}
    return Variant(change=f"{name} handed over as {how}", setting=setting, views={name: how}, start_views=start, may_refuse=True)


def _quantized(expert: Expert, how: WeightQuant) -> Expert:
    halves = [half for half in (expert.gate, expert.up) if half is not None]
    values = [decode(half.codes, half.format) for half in halves]
    if how.layout is Layout.TENSOR:
        together = quantize_weights(torch.cat(values), how)
        parts = [replace(together, codes=codes) for codes in together.codes.chunk(len(values))]
    else:
        parts = [quantize_weights(value, how) for value in values]
    upper = [_projection(half, part, how) for half, part in zip(halves, parts, strict=True)]
    down = _projection(expert.down, quantize_weights(decode(expert.down.codes, expert.down.format), how), how)
    return Expert(gate=upper[0] if expert.gate is not None else None, up=upper[-1], down=down)


def _projection(plain: Projection, made: Quantized, how: WeightQuant) -> Projection:
    codes, scale = encode(made.codes, how.format), made.group_scale.to(torch.float32)
    if not torch.equal(decode(codes, how.format), made.codes):
        raise InvalidCase(f"the reference's codes are no {how.format} numbers")
    return replace(plain, codes=codes, format=how.format, layout=how.layout, scale=scale)
