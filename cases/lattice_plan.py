"""Which small integers and powers of two a lattice layer is made of. No tensors here.

A token's hidden states are ``sign[k] * c * 2**(step + X)`` with c in {1, 2, 3}, except for three kinds of columns: in every 128 of them one
holds ``peak``, so that a dynamic scale is a power of two; one, ``power``, holds a power of two; online quantization also gets ``dump``
columns, zero in every token, whose weights make the weights' own scales powers of two. No other channel reads these.

Weights are ``code * scale``, code = base * 2**comp and scale = 2**(unit - comp): every channel, block or tensor has its own scale, and the
codes make up for it, so that any confusion of scales is a wrong power of two while the pre-activations keep one size.

Pre-activations that silu or gelu sees are coherent: all products of a channel have one sign. They are at least 36 or (silu only) at most
-220, so that halving one scale, or a router weight of 1/2 on the input, leaves them where silu(g) is g, or -0, to the last bit
(references/activations.py). One channel in every 128 is the peak of the intermediate: peak times a power of two.

relu2 has no such channel for a peak of 448: 7 * 2**j is no square of an 8-bit number, nor rounds to one. For 127 it has:
round(127.5**2) = 127 * 2**7 in bf16 and in fp16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cases.axes import ActScale, InvalidCase, Origin
from references.vocabulary import Activation, Format, Layout

if TYPE_CHECKING:
    from cases.case import MoECase

GROUP = 128
PEAK_AT, POWER_AT, DUMP_AT = 5, 9, 12  # columns of a group of 128; the power column is in the first group only
CHANNEL_PEAK_AT, CHANNEL_DUMP_AT = 3, 6  # channels of a group of 128 intermediate channels
X_EXPONENT = -2
SMALLEST = 32  # of H and I: fewer leave too few columns beside the special ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """One of gate_proj and up_proj.

    reads: columns an ordinary channel reads. positive, negative: its bases; both empty for channels with a random sign per weight,
    whose bases are ``mixed``. unit: exponent of a base of 1 times c of 1 in a pre-activation. peak: (column, base) of the peak channel.
    comps: the exponents that codes may make up for.
    """

    reads: int
    positive: tuple[int, ...] = ()
    negative: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()
    unit: int
    peak: tuple[tuple[int, int], ...]
    comps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The numbers of one case.

    peaks: value of the peak column for steps 0 and 1, in units of c. power: value of the power column.
    a1_exponent, a2_exponent: static activation scales. up_offsets: exponents of the experts' up scales beside ``unit``.
    down_codes: largest code of w2; down_exponent: of its smallest scale; down_spread: number of different exponents.
    """

    peaks: tuple[float, float]
    power: int
    gate: Half | None
    up: Half
    a1_exponent: int
    a2_exponent: int
    up_offsets: tuple[int, ...]
    down_codes: int
    down_exponent: int
    down_spread: int


def _comps(fmt: Format, largest: int, *, lowest: int = 0) -> tuple[int, ...]:
    """Exponents c with base * 2**c a code for every base up to ``largest``: for INT8 whole and at most 127, for E4M3FN 8 of them."""
    if fmt is Format.E4M3FN:
        return tuple(range(-2, 6))
    return tuple(c for c in range(lowest, 7) if largest * 2**c <= 127)


def plan(case: MoECase) -> Plan:
    """The lattice of a case.

    Raises:
        InvalidCase: for layers too small to hold the special columns, or larger than a sum can stay exact for.
    """
    for name, size in (("H", case.hidden), ("I", case.intermediate)):
        if size < SMALLEST:
            raise InvalidCase(f"lattice data needs {name} >= {SMALLEST}, got {size}")
    fp8 = case.weight is Format.E4M3FN
    tensor_int8 = case.weight is Format.INT8 and case.act_scale in (ActScale.STATIC_TENSOR, ActScale.DYNAMIC_TENSOR)
    peaks = (448.0, 448.0) if fp8 else (63.0, 63.5) if tensor_int8 else (127.0, 127.0)
    relu2 = case.activation is Activation.RELU2_NO_MUL
    power = (1 if tensor_int8 else 2) if relu2 else 32 if tensor_int8 else 64
    gate, up = _gated(case, fp8, tensor_int8) if case.activation.gated else (None, _single(case, fp8, tensor_int8))
    requantized = case.weight_scale is Layout.TENSOR and gate is not None
    one_amax = case.act_scale is ActScale.DYNAMIC_TENSOR
    plain = case.origin is not Origin.PREQUANTIZED
    return Plan(
        peaks=peaks,
        power=power,
        gate=gate,
        up=up,
        a1_exponent=X_EXPONENT + 1 if fp8 else X_EXPONENT,
        a2_exponent=_largest_exponent(case, fp8),
        up_offsets=(0,) if gate is None or requantized or plain or one_amax else (0, -2, -1, -3),
        down_codes=8 if fp8 or case.act_scale is ActScale.NONE else 63,
        down_exponent=-14 if fp8 or case.act_scale is ActScale.NONE else -17,
        down_spread=4 if case.weight_scale is Layout.BLOCK128 else 6,
    )


def _largest_exponent(case: MoECase, fp8: bool) -> int:
    """Exponent of (the largest intermediate) / qmax: the peak channel of a token at step 1."""
    if case.activation.gated:
        return 6 if fp8 else 8  # 7168 * 4 = 448 * 2**6, 8128 * 4 = 127 * 2**8
    if case.activation is Activation.RELU2_NO_MUL:
        return 5 if fp8 else 7  # 112**2 = 28 * 448, 127 * 2**7
    return 2 if fp8 else 4  # 896 * 2 = 448 * 2**2, 1016 * 2 = 127 * 2**4


def _gated(case: MoECase, fp8: bool, tensor_int8: bool) -> tuple[Half, Half]:
    """gate in [36, 384 * 2] or below -220, up within +-9 * 2; their peaks 448 * 16, 254 * 32 or (254 * 2) * 32 at step 0."""
    base = 1 if fp8 else 4 if tensor_int8 else 2
    silu = case.activation is Activation.SILU
    one_scale = case.weight_scale is Layout.TENSOR
    gate_comps: tuple[int, ...]
    up_comps: tuple[int, ...]
    if one_scale and case.origin is Origin.ONLINE:  # one scale for gate and up
        gate_comps, up_comps = (2, 4, 3), (0, 2, 1)
    elif one_scale and not fp8:  # whole codes after requantizing to the larger scale, even when one scale is doubled first
        gate_comps, up_comps = (3, 4), (1, 2, 3, 4)
    else:
        gate_comps, up_comps = _comps(case.weight, 7), _comps(case.weight, 4)
    reads = min(64, case.hidden - 8)
    gate = Half(
        reads=reads,
        positive=(1, 2),
        negative=(4, 5, 6, 7) if silu else (),
        unit=0 if reads >= 36 else 1,
        peak=((PEAK_AT, base),),
        comps=gate_comps,
    )
    return gate, Half(reads=4, mixed=(1, 2, 3), unit=-2, peak=((POWER_AT, base),), comps=up_comps)


def _single(case: MoECase, fp8: bool, tensor_int8: bool) -> Half:
    if case.activation is Activation.RELU2_NO_MUL:
        reads = min(20 if tensor_int8 else 40, case.hidden - 8)
        peak = ((PEAK_AT, 1),) if fp8 else ((PEAK_AT, 4), (POWER_AT, 1))
        unit = -2 if tensor_int8 else -3
        return Half(reads=reads, positive=(1, 2), negative=(1, 2), unit=unit, peak=peak, comps=_comps(case.weight, 4))
    negative = (4, 5, 6, 7) if case.activation is Activation.SILU_NO_MUL else ()
    reads = min(40 if tensor_int8 else 64, case.hidden - 8)
    peak = ((PEAK_AT, 2 if fp8 else 8),)
    return Half(reads=reads, positive=(1, 2), negative=negative, unit=0 if reads >= 36 else 1, peak=peak, comps=_comps(case.weight, 8))


def special_columns(case: MoECase) -> tuple[list[int], list[int]]:
    """Columns that ordinary channels do not read, and among them the dump columns (online only)."""
    starts = range(0, case.hidden, GROUP)
    peaks = [start + PEAK_AT for start in starts if start + PEAK_AT < case.hidden]
    dumps = [start + DUMP_AT for start in starts if start + DUMP_AT < case.hidden] if case.origin is Origin.ONLINE else []
    return [*peaks, POWER_AT, *dumps], dumps


def peak_channels(case: MoECase) -> list[int]:
    """Intermediate channels that hold the largest value of their group of 128."""
    return [start + CHANNEL_PEAK_AT for start in range(0, case.intermediate, GROUP) if start + CHANNEL_PEAK_AT < case.intermediate]


def dump_channels(case: MoECase) -> list[int]:
    """Intermediate channels that are zero in every token; w2's scales hang on their columns (online only)."""
    if case.origin is not Origin.ONLINE:
        return []
    return [start + CHANNEL_DUMP_AT for start in range(0, case.intermediate, GROUP) if start + CHANNEL_DUMP_AT < case.intermediate]
