"""Layers divided among ranks: which shards begin and end where a group of scales does, and which cut one. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import TYPE_CHECKING

from cases.axes import ActScale, Entry
from cases.case import MoECase
from cases.doors import closed
from cases.generate import PACKED_SCHEMES, SCHEMES, Scheme
from cases.packed import GROUPS, INTEGERS
from cases.rules import entry_takes
from references.vocabulary import CheckpointFormat, Format, Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

RANKS = 2


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank ``rank`` of ``ranks``: it holds that part of the intermediate size, rows of gate and up, columns of down."""

    rank: int
    ranks: int = RANKS


@cache
def shard_cases() -> tuple[MoECase, ...]:
    """Every scheme that the layer entry reads, gated and not, some with biases. Ranks hold whole groups, of narrow ones an odd number."""
    return tuple(_cases())


def leading(case: MoECase) -> bool:
    """Whether smoke asks it too: gated or with a bias, and of the integer groups one width."""
    integers = case.weight in INTEGERS and case.weight_scale in GROUPS
    return case.activation.gated and not (integers and case.weight_scale is not Layout.GROUP32)


def _cases() -> Iterator[MoECase]:
    for number, scheme in enumerate((*SCHEMES, *PACKED_SCHEMES)):
        for activation, bias in (("silu", False), ("relu2_no_mul", False), ("silu", True)):
            if scheme.checkpoint is CheckpointFormat.RAW or (bias and number % 4):
                continue
            hidden, intermediate = _sizes(scheme)
            case = _case(scheme, activation, f"e4k2m8h{hidden}i{intermediate}", bias=bias)
            if entry_takes(case, Entry.LAYER) and closed(case, Entry.LAYER) is None:
                yield case
    for flags in ("", "-bias"):
        yield MoECase.from_id(f"e2m1-group32-none-gptoss-swigluoai-bf16-e4k2m8h128i192-balanced{flags}")


def _sizes(scheme: Scheme) -> tuple[int, int]:
    if scheme.act_scale is ActScale.DYNAMIC_TOKEN and scheme.weight is Format.INT4:
        return 256, 512
    width = scheme.weight_scale.width or 16
    return (256 if width == 128 else 128), RANKS * width * (2 if width == 128 else 3)


def _case(scheme: Scheme, activation: str, size: str, *, bias: bool = False) -> MoECase:
    stored = "online" if scheme.origin.value == "online" else scheme.checkpoint.value
    weight = (scheme.weight or Format.BF16).value
    flags = "-bias" if bias else ""
    return MoECase.from_id(f"{weight}-{scheme.weight_scale}-{scheme.act_scale}-{stored}-{activation}-bf16-{size}-balanced{flags}")


@cache
def cut_cases() -> tuple[MoECase, ...]:
    """Every pre-quantized scheme with groups along the intermediate size, so long that rank 0 ends in the middle of one.

    Integers in groups of 128 say what those of 64 say.
    """
    found = []
    for scheme in (*SCHEMES, *PACKED_SCHEMES):
        width = scheme.weight_scale.width
        w4a8 = scheme.act_scale is ActScale.DYNAMIC_TOKEN  # in whole tiles of 256: no rank can cut a group of 128
        words = scheme.weight in INTEGERS and width == 128
        if (
            width is not None
            and not w4a8
            and not words
            and scheme.origin.value == "prequantized"
            and scheme.checkpoint is not CheckpointFormat.RAW
        ):
            found.append(_case(scheme, "silu", f"e4k2m8h{max(128, 2 * width)}i{3 * width}"))
    return tuple(found)


def whole_groups(case: MoECase, ranks: int = RANKS) -> bool:
    """Whether every rank holds whole groups."""
    return (case.intermediate // ranks) % (case.weight_scale.width or 1) == 0


def common_width(case: MoECase, ranks: int = RANKS) -> Layout | None:
    """The widest groups of which both a group of the case and a shard are made; None when no layout is so narrow."""
    width = gcd(case.weight_scale.width or 1, case.intermediate // ranks)
    return next((layout for layout in (Layout.GROUP16, Layout.GROUP32, Layout.GROUP64, Layout.GROUP128) if layout.width == width), None)
