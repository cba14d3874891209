"""Dense layers: arbitrary mantissas, every scale distinct, outputs of rms about 1.

Magnitudes, for a token of rms 1: gate and up pre-activations have rms 1.5 times or divided by the square root of the
expert's gate/up ratio (1.3 to 4, either way round), the intermediate is brought back to an output of rms 1 by w2.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from cases import dense_packed, packed
from cases.axes import ActScale, Origin
from cases.bits import bells, byte_string, byte_strings, distinct_fp32, grid, permutations
from cases.roles import layer_key, zero_expert
from references.moe import Expert, Projection
from references.vocabulary import Activation, CheckpointFormat, Format, Layout

if TYPE_CHECKING:
    from cases.case import MoECase

TORCH_DTYPE = {
    Format.FP32: torch.float32,
    Format.BF16: torch.bfloat16,
    Format.FP16: torch.float16,
    Format.INT8: torch.int8,
    Format.E4M3FN: torch.float8_e4m3fn,
}

_PRE_ACTIVATION_RMS = 1.5
# activation -> (rms of act(g)*u for a token of rms 1, its largest values for a token of rms 2); measured on dense layers
_INTERMEDIATE = {
    Activation.SILU: (1.4, 36.0),
    Activation.GELU: (1.5, 36.0),
    Activation.GELU_TANH: (1.5, 36.0),
    Activation.SILU_NO_MUL: (0.8, 8.0),
    Activation.GELU_NO_MUL: (0.95, 8.0),
    Activation.RELU2_NO_MUL: (2.8, 60.0),
    Activation.GELU_TANH_NO_MUL: (0.95, 8.0),
    Activation.SWIGLUOAI: (1.7, 36.0),
    Activation.SWIGLUOAI_UNINTERLEAVE: (1.7, 36.0),
    Activation.SWIGLUSTEP: (1.3, 36.0),
    Activation.SITU: (1.1, 36.0),
}
_TIGHTENS = 2  # what small limits take from the intermediate's rms
_INPUT_PEAK = 4.5  # of 6.9 possible for a token of rms 2: a few inputs saturate
_QUANT_MAX = {Format.INT8: 127.0, Format.E4M3FN: 448.0, Format.E2M1: 6.0}
_BIAS_STEPS = 128  # mantissas that bf16, and so every hidden dtype, holds exactly
_MIN_EXPERTS_FOR_TINY = 3


def dense_experts(case: MoECase) -> tuple[Expert, ...]:
    """The layer of a case as a checkpoint would hold it; see Projection for shapes."""
    if case.origin is Origin.PREQUANTIZED and packed.is_packed(case):
        return _packed_experts(case)
    scales, prequantized = _scales(case), case.origin is Origin.PREQUANTIZED
    inputs = _input_scales(case) if case.static_input else {}
    weights = {name: _codes(case, name) if prequantized else _amplitudes(case, name, scales[name]) for name in case.projections}
    biases = {name: _biases(case, name) for name in case.projections} if case.bias else {}
    if (zero := zero_expert(case)) is not None:
        for each in weights.values():
            each.view(torch.uint8)[zero] = 0

    def projection(expert: int, name: str) -> Projection:
        return Projection(
            codes=weights[name][expert].clone(),  # memory of its own, as what is read from a file
            format=case.stored,
            layout=case.weight_scale if prequantized else Layout.NONE,
            scale=scales[name][expert] if prequantized else None,
            input_scale=inputs[name][expert] if inputs else None,
            bias=biases[name][expert].clone() if biases else None,
        )

    return tuple(
        Expert(
            gate=projection(expert, "gate_proj") if case.activation.gated else None,
            up=projection(expert, "up_proj"),
            down=projection(expert, "down_proj"),
        )
        for expert in range(case.experts)
    )


def _packed_experts(case: MoECase) -> tuple[Expert, ...]:
    unit = dense_packed.unit(case)
    sizes = {name: (size / (unit * case.shape(name)[1] ** 0.5)).tolist() for name, size in _targets(case).items()}
    whole: dict[str, torch.Tensor] = {}
    if case.weight_scale is Layout.GROUP16:  # NVFP4: the larger half's magnitude in the global scale, the other's below it
        halves = [name for name in case.projections if name != "down_proj"]
        larger = [max(values) for values in zip(*(sizes[name] for name in halves), strict=True)]
        tops = {name: sizes[name] if name == "down_proj" else larger for name in case.projections}
        whole = dense_packed.global_scales(case, tops, "global_scale")
        sizes = {name: [own / top for own, top in zip(sizes[name], tops[name], strict=True)] for name in case.projections}
    scales = dense_packed.own_scales(case, sizes)
    inputs: dict[str, torch.Tensor] = {}
    if case.act_scale is ActScale.DYNAMIC_GROUP16:
        peaks = {name: _INTERMEDIATE[case.activation][1] if name == "down_proj" else _INPUT_PEAK for name in case.projections}
        peak_code = _QUANT_MAX[Format.E4M3FN] * _QUANT_MAX[Format.E2M1]
        inputs = dense_packed.global_scales(case, {name: [peak / peak_code] * case.experts for name, peak in peaks.items()}, "input_scale")

    biases = {name: _biases(case, name) for name in case.projections} if case.bias else {}
    zero = zero_expert(case)

    def projection(expert: int, name: str) -> Projection:
        codes = dense_packed.codes(case, _key(case, expert, name, "weight"), case.shape(name))
        return Projection(
            codes=dense_packed.zero_code(case, expert, name) if expert == zero else codes,
            format=case.weight,
            layout=case.weight_scale,
            scale=scales[name][expert],
            input_scale=inputs[name][expert] if inputs else None,
            bias=biases[name][expert].clone() if biases else None,
            zero_point=dense_packed.zero_points(case, expert, name),
            global_scale=whole[name][expert] if whole else None,
        )

    return tuple(
        Expert(
            gate=projection(expert, "gate_proj") if case.activation.gated else None,
            up=projection(expert, "up_proj"),
            down=projection(expert, "down_proj"),
        )
        for expert in range(case.experts)
    )


def _key(case: MoECase, expert: int, name: str, what: str) -> str:
    return f"{layer_key(case)} {expert}.{name}.{what}"


def _keys(case: MoECase, name: str, what: str) -> list[str]:
    return [_key(case, expert, name, what) for expert in range(case.experts)]


def _codes(case: MoECase, name: str) -> torch.Tensor:
    """[E, N, K], uniform over all finite codes of the format."""
    rows, columns = case.shape(name)
    return _finite(byte_strings(_keys(case, name, "weight"), rows * columns).view(-1, rows, columns), case.weight)


def _amplitudes(case: MoECase, name: str, scale: torch.Tensor) -> torch.Tensor:
    """[E, N, K] weights in the hidden dtype; scale [E, N, 1]: amplitudes per output channel."""
    return (bells(_keys(case, name, "weight"), case.shape(name)) * scale.double()).to(TORCH_DTYPE[case.dtype])


def _finite(drawn: torch.Tensor, fmt: Format) -> torch.Tensor:
    if fmt is Format.E4M3FN:  # S.1111.111 is NaN: the two become zeros
        drawn = torch.where(drawn & 0x7F == 0x7F, drawn & 0x80, drawn)
    return drawn.view(TORCH_DTYPE[fmt])


@cache
def _code_rms(fmt: Format) -> float:
    every = _finite(torch.arange(256, dtype=torch.uint8), fmt).to(torch.float64)
    return float(every.square().mean().sqrt())


def _targets(case: MoECase) -> dict[str, torch.Tensor]:
    """Per projection [E] float64: rms of its output for an input of rms 1."""
    ratio = grid(f"{layer_key(case)} gate/up", (case.experts,), 1.3, 4.0)
    flip = byte_string(f"{layer_key(case)} gate/up side", case.experts) & 1 == 1
    gate = torch.where(flip, ratio, 1 / ratio).sqrt() if case.activation.gated else torch.ones_like(ratio)
    target = {
        "gate_proj": _PRE_ACTIVATION_RMS * gate,
        "up_proj": _PRE_ACTIVATION_RMS / gate,
        "down_proj": torch.full_like(gate, (_TIGHTENS if case.tight else 1) / _INTERMEDIATE[case.activation][0]),
    }
    return {name: target[name] for name in case.projections}


def _scales(case: MoECase) -> dict[str, torch.Tensor]:
    """Per projection, [E, *scale_shape] float32 (hidden-dtype weights: [E, N, 1] amplitudes); no two equal in the layer."""
    prequantized = case.origin is Origin.PREQUANTIZED
    unit = _code_rms(case.weight) if prequantized else 1.0
    target = _targets(case)
    shapes = {name: case.scale_shape(name) if prequantized else (case.shape(name)[0], 1) for name in case.projections}
    drawn: list[torch.Tensor] = []
    for name in case.projections:
        # few values each: gate and up share the spread, so that their ratio is the expert's and never near 1 by chance
        few = prequantized and case.weight_scale is not Layout.CHANNEL and name != "down_proj"
        factors = grid(f"{layer_key(case)} {'w13' if few else name}.scale", (case.experts, *shapes[name]), 0.6, 1.5)
        size = target[name] / (unit * case.shape(name)[1] ** 0.5)
        drawn.append(factors * size.view(-1, *(1 for _ in shapes[name])))
        if name == "up_proj":
            _make_one_tiny(case, drawn[-1])
    distinct = distinct_fp32(torch.cat([scale.flatten() for scale in drawn]))
    parts = torch.split_with_sizes(distinct, [scale.numel() for scale in drawn])
    return {name: part.view(scale.shape) for name, part, scale in zip(case.projections, parts, drawn, strict=True)}


def _make_one_tiny(case: MoECase, scale: torch.Tensor) -> None:
    """One channel or block of the last expert's up projection, neither first nor last, is 2**-20 of its neighbours."""
    last = scale[-1].view(-1)
    if case.experts < _MIN_EXPERTS_FOR_TINY or last.numel() < 3:
        return
    fp16_weights = case.stored is Format.FP16  # 2**-20 of a weight would be no fp16 number
    last[last.numel() // 2] *= 2.0**-10 if fp16_weights else 2.0**-20


def _input_scales(case: MoECase) -> dict[str, torch.Tensor]:
    """Per projection, [E] float32.

    gate and up of one expert see the same input, yet checkpoints may calibrate them apart; up is the larger, because
    vLLM 0.33.0 keeps the one it loads last (routed_experts.py, ``_load_single_value``). Compressed-tensors refuses
    two values (same file), so there gate has up's.
    """
    peaks = {"gate_proj": _INPUT_PEAK, "up_proj": _INPUT_PEAK, "down_proj": _INTERMEDIATE[case.activation][1]}
    drawn = {name: grid(f"{layer_key(case)} {name}.input_scale", (case.experts,), 0.7, 1.0) for name in case.projections}
    if case.activation.gated:
        drawn["gate_proj"] = drawn["up_proj"] * grid(f"{layer_key(case)} gate_proj.input_scale", (case.experts,), 0.6, 0.9)
    stacked = torch.cat([drawn[name] * peaks[name] / _QUANT_MAX[case.weight] for name in case.projections])
    scales = dict(zip(case.projections, distinct_fp32(stacked).view(-1, case.experts), strict=True))
    if case.checkpoint is CheckpointFormat.COMPRESSED_TENSORS and case.activation.gated:
        scales["gate_proj"] = scales["up_proj"].clone()
    return scales


def _biases(case: MoECase, name: str) -> torch.Tensor:
    """[E, N] hidden dtype: +-(1 + m/128) * 2**-e, m < 128, 1 <= e <= 4, all different in an expert while N <= 1024."""
    rows = case.shape(name)[0]
    pick = permutations(_keys(case, name, "bias"), max(rows, 8 * _BIAS_STEPS))[:, :rows] % (8 * _BIAS_STEPS)
    mantissa = 1 + (pick % _BIAS_STEPS).to(torch.float64) / _BIAS_STEPS
    value = torch.ldexp(mantissa, -1 - (pick // _BIAS_STEPS) % 4)
    return torch.where(pick // (4 * _BIAS_STEPS) == 0, value, -value).to(TORCH_DTYPE[case.dtype])
