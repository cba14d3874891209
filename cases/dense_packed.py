"""Dense layers of the packed and microscaled formats: every code in play, neighbouring scales and zero points different.

Few-bit scales cannot all be distinct over a layer. They are laid out so that a scale differs from those of the next row, the next group,
the next expert and the other half of w13; a wrong index is seen. Magnitudes as in cases/dense.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from cases import packed
from cases.bits import byte_string, grid, permutation
from cases.roles import layer_key
from references.formats import decode, limits, round_to, torch_dtype
from references.vocabulary import Format

if TYPE_CHECKING:
    from cases.case import MoECase

_STEPS = {"gate_proj": 0, "up_proj": 1, "down_proj": 2}
_E8M0_SPREAD = 5  # exponents from -2 to 2 around the projection's own
_E8M0_TINY = -20
_E4M3_TOP = 0x7E  # 448
_E4M3_WINDOW = 31  # codes below the top: four binades but one
_BF16_WINDOW = (0.6, 1.5)
_SMALLEST_SCALE = 2.0**-14  # the smallest normal fp16
_ZERO_POINTS = {Format.UINT4: (4, 9), Format.UINT8: (112, 33)}  # the lowest, and how many


def codes(case: MoECase, key: str, shape: tuple[int, int]) -> torch.Tensor:
    """[N, K] codes in the format's torch dtype, uniform over all of them (INT4 and INT8 without the lowest, which has no opposite)."""
    drawn = byte_string(key, shape[0] * shape[1]).view(shape)
    match case.weight:
        case Format.INT4:
            return ((drawn.to(torch.int64) * 15 >> 8) - 7).to(torch.int8)
        case Format.INT8:
            return ((drawn.to(torch.int64) * 255 >> 8) - 127).to(torch.int8)
        case Format.UINT4 | Format.E2M1:
            return drawn & 0xF
        case Format.E4M3FN:  # S.1111.111 is NaN: the two become zeros
            return torch.where(drawn & 0x7F == 0x7F, drawn & 0x80, drawn).view(torch_dtype(case.weight))
        case _:
            return drawn


def zero_points(case: MoECase, expert: int, name: str) -> torch.Tensor | None:
    """[N, G] uint8 around the middle of the range; None for symmetric formats."""
    if not case.weight.has_zero_point:
        return None
    lowest, count = _ZERO_POINTS[case.weight]
    return (lowest + _pattern(case, expert, name, count)).to(torch.uint8)


def zero_code(case: MoECase, expert: int, name: str) -> torch.Tensor:
    """[N, K] or broadcastable: the codes that mean zero."""
    points = zero_points(case, expert, name)
    if points is None:
        return torch.zeros(case.shape(name), dtype=torch_dtype(case.weight))
    width = case.weight_scale.width
    return points.expand(case.shape(name)).clone() if width is None else points.repeat_interleave(width, 1)


def _pattern(case: MoECase, expert: int, name: str, count: int) -> torch.Tensor:
    """[N, G] int64 below ``count``: neighbours in rows, groups, experts and halves differ. No power of two rows (or groups, or experts)
    apart are two alike: every count is odd."""
    rows, columns = case.scale_shape(name)
    row, column = torch.arange(rows).unsqueeze(1), torch.arange(columns)
    out: torch.Tensor = (row + 2 * column + 4 * expert + 7 * _STEPS[name]) % count
    return out


def unit(case: MoECase) -> float:
    """Root mean square of a code less its zero point, times a scale less its projection's own magnitude."""
    if case.weight in (Format.E2M1, Format.E4M3FN):
        every = decode(codes(case, "every", (256, 64)), case.weight)
    else:
        span = limits(case.weight).max
        every = torch.arange(-span, span + 1, dtype=torch.float64) if not case.weight.has_zero_point else _differences(case)
    return float(every.square().mean().sqrt()) * _relative_rms(case)


def _differences(case: MoECase) -> torch.Tensor:
    lowest, count = _ZERO_POINTS[case.weight]
    values = torch.arange(limits(case.weight).max + 1, dtype=torch.float64)
    return (values.unsqueeze(1) - torch.arange(lowest, lowest + count, dtype=torch.float64)).flatten()


def _relative_rms(case: MoECase) -> float:
    match packed.scale_format(case):
        case Format.E8M0:
            exponents = [2.0 ** (step - _E8M0_SPREAD // 2) for step in range(_E8M0_SPREAD)]
            return math.sqrt(sum(value * value for value in exponents) / len(exponents))
        case Format.E4M3FN:
            return float(_e4m3_window(0).square().mean().sqrt())
        case _:
            low, high = _BF16_WINDOW
            return math.sqrt((high**3 - low**3) / (3 * (high - low)))


def scales(case: MoECase, expert: int, name: str, size: float) -> torch.Tensor:
    """[N, G] or [N, 1] float32 holding values of the scale's own format.

    size: the projection's magnitude; for E4M3 as a part of the global scale, at most 1.
    """
    match packed.scale_format(case):
        case Format.E8M0:
            mantissa, own = math.frexp(size)
            own -= mantissa < math.sqrt(0.5)
            exponent = own + _pattern(case, expert, name, _E8M0_SPREAD) - _E8M0_SPREAD // 2
            if _has_tiny(case, expert, name):
                exponent.view(-1)[exponent.numel() // 2] += _E8M0_TINY
            return torch.ldexp(torch.ones(exponent.shape), exponent.to(torch.int32))
        case Format.E4M3FN:
            mantissa, power = math.frexp(size)
            below = round(-8 * (power - 1 + 2 * mantissa - 1))  # about 8 codes to a binade
            values = _e4m3_window(below)[_pattern(case, expert, name, _E4M3_WINDOW)]
            if _has_tiny(case, expert, name):
                values.view(-1)[values.numel() // 2] = limits(Format.E4M3FN).min_subnormal
            return values.to(torch.float32)
        case _:
            return _bf16_scales(case, expert, name, size)


def _has_tiny(case: MoECase, expert: int, name: str) -> bool:
    rows, columns = case.scale_shape(name)
    return expert == case.experts - 1 and case.experts > 2 and name == "up_proj" and rows * columns > 2


def _e4m3_window(below: int) -> torch.Tensor:
    top = _E4M3_TOP - below
    patterns = torch.arange(top - _E4M3_WINDOW + 1, top + 1, dtype=torch.uint8)
    return decode(patterns.view(torch.float8_e4m3fn), Format.E4M3FN)


def _bf16_scales(case: MoECase, expert: int, name: str, size: float) -> torch.Tensor:
    """Different bf16 numbers in shuffled order, each expert and projection from its own start; all of them are fp16 numbers too."""
    low, high = (torch.tensor([factor * size], dtype=torch.bfloat16).view(torch.int16).item() for factor in _BF16_WINDOW)
    values = torch.arange(int(low), int(high), dtype=torch.int16).view(torch.bfloat16).to(torch.float32)
    shuffled = values[permutation(f"{layer_key(case)} {name}.scale", values.numel())]
    rows, columns = case.scale_shape(name)
    out = shuffled[(torch.arange(rows * columns) + 37 * expert) % values.numel()].view(rows, columns)
    if _has_tiny(case, expert, name):
        out.view(-1)[out.numel() // 2] = _SMALLEST_SCALE
    return out


def own_scales(case: MoECase, wanted: dict[str, list[float]]) -> dict[str, list[torch.Tensor]]:
    """Per projection and expert: the scales that give it its wanted magnitude. Gate's and up's differ at every place but for INT8 and INT4,
    where a few of thousands may not."""
    out: dict[str, list[torch.Tensor]] = {name: [] for name in case.projections}
    step = {Format.E8M0: 2.0, Format.E4M3FN: 2.0 ** (-1 / 8)}.get(packed.scale_format(case))
    for expert in range(case.experts):
        for name in case.projections:
            size = wanted[name][expert]
            made = scales(case, expert, name, size)
            while step is not None and name == "up_proj" and case.activation.gated and bool((made == out["gate_proj"][expert]).any()):
                size *= step
                made = scales(case, expert, name, size)
            out[name].append(made)
    return out


def global_scales(case: MoECase, sizes: dict[str, list[float]], what: str) -> dict[str, torch.Tensor]:
    """Per projection [E] float32, distinct over experts, gate's and up's alike; 1 / (1 / g) == g in fp32, so that files may hold either."""
    out = {}
    for name in case.projections:
        factors = grid(f"{layer_key(case)} {'w2' if name == 'down_proj' else 'w13'}.{what}", (case.experts,), 0.8, 1.2)
        wanted = factors * torch.tensor(sizes[name], dtype=torch.float64)
        out[name] = torch.tensor([_invertible(float(value)) for value in wanted], dtype=torch.float32)
    return out


def _invertible(value: float) -> float:
    """The fp32 number from ``value`` up that two reciprocals give back."""
    number = torch.tensor([value], dtype=torch.float64)
    number = round_to(number, Format.FP32)
    while not torch.equal(round_to(1.0 / round_to(1.0 / number, Format.FP32), Format.FP32), number):
        number = torch.nextafter(number.float(), torch.tensor([math.inf])).double()
    return float(number)
