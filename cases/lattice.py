"""Lattice layers and batches: small integers and powers of two, as cases/lattice_plan.py lays them out.

The generator proposes; cases/lattice_proof.py proves, with the interval reference, that nothing on the path of one recipe can round in
a way that is not known, and refuses data for which it cannot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cases.axes import InvalidCase, Origin
from cases.bits import byte_string, permutation, words
from cases.lattice_plan import (
    POWER_AT,
    X_EXPONENT,
    Half,
    Plan,
    dump_channels,
    peak_channels,
    plan,
    special_columns,
)
from cases.roles import layer_key, zero_expert
from references.formats import encode, limits, torch_dtype
from references.moe import Expert, Projection
from references.scales import expand
from references.vocabulary import Activation, CheckpointFormat, Layout

if TYPE_CHECKING:
    from cases.case import MoECase

_BIAS_STEPS = 4


def lattice_experts(case: MoECase) -> tuple[Expert, ...]:
    """The layer of a case as a checkpoint would hold it; see Projection for shapes.

    Raises:
        InvalidCase: for sizes the lattice is not laid out for.
    """
    layout = plan(case)
    return tuple(
        Expert(
            gate=_projection(case, layout, expert, "gate_proj") if layout.gate is not None else None,
            up=_projection(case, layout, expert, "up_proj"),
            down=_projection(case, layout, expert, "down_proj"),
        )
        for expert in range(case.experts)
    )


def lattice_hidden_states(case: MoECase, key: str, zero_row: int | None) -> torch.Tensor:
    """[M, H] hidden dtype. ``zero_row`` is all zero, unless biases would give it a pre-activation of its own.

    ``key`` names the batch (cases/batch.py).
    """
    layout = plan(case)
    sign = torch.where(byte_string(f"{layer_key(case)} lattice signs", case.hidden) & 1 == 1, -1.0, 1.0).double()
    values = (byte_string(f"{key} lattice", case.tokens * case.hidden) % 3 + 1).to(torch.float64).view(case.tokens, case.hidden)
    step = 1 - permutation(f"{key} steps", case.tokens) % 2
    columns, dumps = special_columns(case)
    for column in columns:
        values[:, column] = torch.tensor(layout.peaks, dtype=torch.float64)[step]
    values[:, POWER_AT] = layout.power
    values = values * sign * torch.exp2(step.to(torch.float64) + X_EXPONENT).unsqueeze(1)
    values[:, dumps] = 0
    if zero_row is not None and not case.bias:
        values[zero_row] = 0
    return values.to(torch_dtype(case.dtype))


def lattice_weights(case: MoECase, key: str) -> torch.Tensor:
    """[M, k] float32 router weights for an entry that is given them: powers of two, different in neighbouring slots.

    With the weight on the input 1 or 1/2: pre-activations must stay where the activation is exact.
    """
    turn = torch.arange(case.tokens).unsqueeze(1) + 2 * torch.arange(case.top_k) + permutation(f"{key} weights", 4)[0]
    return torch.exp2(-(turn % (2 if case.router_weight_on_input else 4)).to(torch.float32))


def _projection(case: MoECase, layout: Plan, expert: int, name: str) -> Projection:
    exponents = _scale_exponents(case, layout, expert, name)
    codes = _down(case, layout, expert) if name == "down_proj" else _upper(case, layout, expert, name, exponents)
    if expert == zero_expert(case):
        codes = torch.zeros_like(codes)
    scale = torch.exp2(exponents.to(torch.float64))
    if case.origin is Origin.ONLINE:
        _dump(case, codes, name)
    if case.origin is Origin.PREQUANTIZED:
        stored, kept = encode(codes, case.weight), scale.to(torch.float32)
    else:
        values = codes * expand(scale, _layout(case), *codes.shape)
        stored, kept = values.to(torch_dtype(case.dtype)), None
        codes, stored_values = values, stored.to(torch.float64)
    exact = stored.to(torch.float64) if kept is not None else stored_values
    if not torch.equal(exact, codes):
        raise InvalidCase(f"lattice data: a weight of {expert}.{name} is no {case.stored} number")
    return Projection(
        codes=stored,
        format=case.stored,
        layout=case.weight_scale if kept is not None else Layout.NONE,
        scale=kept,
        input_scale=_input_scale(case, layout, expert, name),
        bias=_bias(case, layout, expert, name) if case.bias else None,
    )


def _layout(case: MoECase) -> Layout:
    """How scales are laid out; unquantized layers get amplitudes per channel."""
    return Layout.CHANNEL if case.weight_scale is Layout.NONE else case.weight_scale


def _half(layout: Plan, name: str) -> Half:
    half = layout.gate if name == "gate_proj" else layout.up
    assert half is not None
    return half


def _scale_exponents(case: MoECase, layout: Plan, expert: int, name: str) -> torch.Tensor:
    """Exponents of the scales, int64 in the layout's shape: neighbours in the flattened buffer of all experts always differ."""
    shape = case.scale_shape(name) if _layout(case) is case.weight_scale else (case.shape(name)[0], 1)
    count = max(1, int(torch.Size(shape).numel()))
    if name == "down_proj":
        at = _cycle(torch.arange(count), count, expert, layout.down_spread)
        offset = layout.up_offsets[expert % len(layout.up_offsets)]
        return (layout.down_exponent + at - offset).view(shape)
    half = _half(layout, name)
    place = count if name == "up_proj" and layout.gate is not None else 0
    merged = count * (2 if layout.gate is not None else 1)
    if case.weight_scale is Layout.TENSOR:
        apart = expert // len(half.comps) if name == "up_proj" and case.origin is not Origin.ONLINE else 0
        comp = torch.tensor([half.comps[(expert + apart) % len(half.comps)]])
    else:
        comp = torch.tensor(half.comps)[_cycle(place + torch.arange(count), merged, expert, len(half.comps))]
    offset = layout.up_offsets[expert % len(layout.up_offsets)] if name == "up_proj" else 0
    return (half.unit - X_EXPONENT - comp + offset).view(shape)


def _cycle(place: torch.Tensor, size: int, expert: int, length: int) -> torch.Tensor:
    """Index into a cycle of ``length`` for the ``place``-th of ``size`` scales of an expert; none begins where the one before it did."""
    return (place + (size + (1 if (size + 2) % length == 0 else 2)) * expert) % length


def _upper(case: MoECase, layout: Plan, expert: int, name: str, exponents: torch.Tensor) -> torch.Tensor:
    """Codes of gate_proj or up_proj, [I, H] float64."""
    half, (rows, cols) = _half(layout, name), case.shape(name)
    key = f"{layer_key(case)} {expert}.{name} lattice"
    special, _ = special_columns(case)
    order = words(f"{key} reads", rows * cols).view(rows, cols)
    order[:, special] = 2**40
    reads = torch.zeros(rows, cols, dtype=torch.bool)
    reads.scatter_(1, order.argsort(1)[:, : half.reads], True)
    drawn = byte_string(f"{key} bases", rows * cols).to(torch.int64).view(rows, cols)
    if half.mixed:
        base = torch.tensor(half.mixed)[drawn % len(half.mixed)] * torch.where(drawn & 128 == 128, -1, 1)
    else:
        sign = torch.where(byte_string(f"{layer_key(case)} lattice signs", cols) & 1 == 1, -1, 1)
        base = torch.tensor(half.positive)[drawn % len(half.positive)]
        if half.negative:
            negative = (byte_string(f"{key} signs", rows) & 1 == 1).unsqueeze(1)
            base = torch.where(negative, -torch.tensor(half.negative)[drawn % len(half.negative)], base)
        base = base * sign
    base = base * reads
    base[peak_channels(case)] = _peak_row(case, half)
    base[dump_channels(case)] = 0
    comp = (half.unit - X_EXPONENT - exponents).to(torch.float64)
    if name == "up_proj":
        comp = comp + layout.up_offsets[expert % len(layout.up_offsets)]
    return base.to(torch.float64) * torch.exp2(expand(comp, _layout(case), rows, cols))


def _peak_row(case: MoECase, half: Half) -> torch.Tensor:
    sign = torch.where(byte_string(f"{layer_key(case)} lattice signs", case.hidden) & 1 == 1, -1, 1)
    row = torch.zeros(case.hidden, dtype=torch.int64)
    for column, base in half.peak:
        row[column] = base * sign[column]
    return row


def _down(case: MoECase, layout: Plan, expert: int) -> torch.Tensor:
    """Codes of down_proj, [H, I] float64: whole numbers up to ``down_codes``, none of them 0."""
    rows, cols = case.shape("down_proj")
    drawn = byte_string(f"{layer_key(case)} {expert}.down_proj lattice", rows * cols).to(torch.int64).view(rows, cols)
    magnitude = (drawn & 127) % layout.down_codes + 1
    return torch.where(drawn & 128 == 128, -magnitude, magnitude).to(torch.float64)


def _dump(case: MoECase, codes: torch.Tensor, name: str) -> None:
    """Puts the largest code where nothing is ever read, so that online quantization finds the scale the codes were made for."""
    columns = dump_channels(case) if name == "down_proj" else special_columns(case)[1]
    codes[:, columns] = limits(case.weight).qmax


def _input_scale(case: MoECase, layout: Plan, expert: int, name: str) -> torch.Tensor | None:
    """[] float32. The last expert's is the largest, the one vLLM keeps; gate's is half of up's where a checkpoint may say so."""
    if not case.static_input:
        return None
    exponent = layout.a2_exponent if name == "down_proj" else layout.a1_exponent
    exponent -= (case.experts - 1 - expert) % 3
    if name == "gate_proj" and case.checkpoint is not CheckpointFormat.COMPRESSED_TENSORS:
        exponent -= 1
    return torch.tensor(2.0**exponent, dtype=torch.float32)


def _bias(case: MoECase, layout: Plan, expert: int, name: str) -> torch.Tensor:
    """[N] hidden dtype, multiples of a base's unit, of a coherent channel's sign; none on peak, dump and zero channels of w13."""
    rows, _ = case.shape(name)
    key = f"{layer_key(case)} {expert}.{name} lattice"
    drawn = byte_string(f"{key} bias", rows).to(torch.float64)
    if name == "down_proj":
        return ((drawn - 128) / 64).to(torch_dtype(case.dtype))
    half = _half(layout, name)
    steps = drawn % _BIAS_STEPS
    negative = byte_string(f"{key} bias signs" if half.mixed else f"{key} signs", rows) & 1 == 1
    squared = case.activation is Activation.RELU2_NO_MUL  # whose sums have no bit to spare for an odd bias in fp32
    values = torch.where(negative & bool(half.mixed or half.negative), -steps, steps) * 2.0 ** (half.unit + squared)
    values[[*peak_channels(case), *dump_channels(case)]] = 0
    if expert == zero_expert(case):
        values = torch.zeros_like(values)
    return values.to(torch_dtype(case.dtype))


def lattice_logits(case: MoECase, chosen: torch.Tensor) -> torch.Tensor:
    """[M, E] float32: 0 for the chosen experts, so that softmax gives 1/k to the bit when k is a power of two; exp of the others is 0."""
    others = -200.0 - torch.arange(case.experts, dtype=torch.float32).expand(case.tokens, case.experts)
    return others.scatter(1, chosen, 0.0)
