"""One MoE layer, one way of quantizing it, one batch. Data only: no tensors, no torch, no vLLM names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from cases.axes import ActScale, Data, Entry, InvalidCase, Level, Origin, Routing
from cases.rules import check, entry_takes
from references.vocabulary import Activation, CheckpointFormat, Format, Layout

__all__ = ["ID_SHAPE", "ActScale", "Data", "Entry", "InvalidCase", "Level", "MoECase", "Origin", "Routing", "entry_takes"]

_Member = TypeVar("_Member", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoECase:
    """A frozen case. ``MoECase.from_id(case.id) == case`` for every valid case.

    Raises:
        InvalidCase: from the constructor, naming the rule and the value.
    """

    experts: int  # E
    top_k: int  # k
    tokens: int  # M
    hidden: int  # H
    intermediate: int  # I, per partition
    dtype: Format  # hidden states, output, and unquantized weights
    weight: Format  # == dtype when unquantized; after online quantization for Origin.ONLINE
    weight_scale: Layout
    act_scale: ActScale
    checkpoint: CheckpointFormat
    origin: Origin
    activation: Activation
    bias: bool = False
    renormalize: bool = True
    router_weight_on_input: bool = False  # only with top_k == 1
    tight: bool = False  # the activation's limits are small: cases/gating.py
    routing: Routing = Routing.BALANCED
    data: Data = Data.DENSE
    seed: int = 0

    def __post_init__(self) -> None:
        check(self)

    @property
    def quantized(self) -> bool:
        """True when the weights that run are codes with scales."""
        return self.origin is not Origin.UNQUANTIZED

    @property
    def weight_only(self) -> bool:
        """True when quantized weights meet activations in the hidden dtype."""
        return self.quantized and self.act_scale is ActScale.NONE

    @property
    def static_input(self) -> bool:
        """True when the checkpoint holds activation scales."""
        return self.act_scale is ActScale.STATIC_TENSOR

    @property
    def stored(self) -> Format:
        """The format of the checkpoint's weight tensors; the hidden dtype before online quantization."""
        return self.weight if self.origin is Origin.PREQUANTIZED else self.dtype

    @property
    def projections(self) -> tuple[str, ...]:
        """Checkpoint names, in the order of the tensors on disk."""
        return ("gate_proj", "up_proj", "down_proj") if self.activation.gated else ("up_proj", "down_proj")

    @property
    def w13_rows(self) -> int:
        """Rows of the merged w13: 2*I when gated (gate first), I otherwise."""
        return self.intermediate * (2 if self.activation.gated else 1)

    def shape(self, projection: str) -> tuple[int, int]:
        """[N, K] of one projection's weight: [I, H] for gate_proj and up_proj, [H, I] for down_proj."""
        up = (self.intermediate, self.hidden)
        return up[::-1] if projection == "down_proj" else up

    def scale_shape(self, projection: str) -> tuple[int, ...]:
        """Logical shape of one projection's scales: TENSOR (), CHANNEL (N, 1), BLOCK128 (ceil(N/128), ceil(K/128)), groups (N, K/width)."""
        rows, columns = self.shape(projection)
        width = self.weight_scale.width
        match self.weight_scale:
            case Layout.CHANNEL:
                return (rows, 1)
            case Layout.BLOCK128:
                return (-(-rows // 128), -(-columns // 128))
            case Layout.GROUP16 | Layout.GROUP32 | Layout.GROUP64 | Layout.GROUP128 if width is not None:
                return (rows, columns // width)
            case _:
                return ()

    @property
    def id(self) -> str:
        """``<weight>-<weight scale>-<act scale>-<checkpoint>-<activation>-<dtype>-e.k.m.h.i.-<routing>[-flag...][-s<seed>]``."""
        parts = [
            self.weight.value,
            self.weight_scale.value,
            self.act_scale.value,
            _ONLINE if self.origin is Origin.ONLINE else self.checkpoint.value,
            self.activation.value,
            self.dtype.value,
            f"e{self.experts}k{self.top_k}m{self.tokens}h{self.hidden}i{self.intermediate}",
            self.routing.value,
        ]
        parts += [flag for flag, on in zip(_FLAGS, self._flags(), strict=True) if on]
        parts += [f"s{self.seed}"] if self.seed else []
        return "-".join(parts)

    def _flags(self) -> tuple[bool, ...]:
        return (self.bias, not self.renormalize, self.router_weight_on_input, self.tight, self.data is Data.LATTICE)

    @classmethod
    def from_id(cls, text: str) -> MoECase:
        """The case of an id.

        Raises:
            InvalidCase: naming the part that is wrong and what was expected there.
        """
        parts = text.split("-")
        if len(parts) < _FIXED:
            raise InvalidCase(f"id '{text}' has {len(parts)} of at least {_FIXED} parts; expected {ID_SHAPE}")
        weight = _member(text, "weight format", parts[0], Format)
        weight_scale = _member(text, "weight scale", parts[1], Layout)
        act_scale = _member(text, "activation scale", parts[2], ActScale)
        stored = CheckpointFormat.PLAIN if parts[3] == _ONLINE else _member(text, "checkpoint", parts[3], CheckpointFormat, _ONLINE)
        activation = _member(text, "activation", parts[4], Activation)
        dtype = _member(text, "hidden dtype", parts[5], Format)
        sizes = re.fullmatch("".join(rf"{size}({_NUMBER})" for size in "ekmhi"), parts[6], re.ASCII)
        if sizes is None:
            raise _bad_part(text, "sizes", parts[6], "e<E>k<k>m<M>h<H>i<I>, such as e4k2m8h128i64")
        experts, top_k, tokens, hidden, intermediate = map(int, sizes.groups())
        routing = _member(text, "routing", parts[7], Routing)
        flags, seed = _tail(text, parts[_FIXED:])
        origin = Origin.UNQUANTIZED if stored is CheckpointFormat.PLAIN else Origin.PREQUANTIZED
        case = cls(
            experts=experts,
            top_k=top_k,
            tokens=tokens,
            hidden=hidden,
            intermediate=intermediate,
            dtype=dtype,
            weight=weight,
            weight_scale=weight_scale,
            act_scale=act_scale,
            checkpoint=stored,
            origin=Origin.ONLINE if parts[3] == _ONLINE else origin,
            activation=activation,
            bias="bias" in flags,
            renormalize="norenorm" not in flags,
            router_weight_on_input="onin" in flags,
            tight="tight" in flags,
            routing=routing,
            data=Data.LATTICE if "lattice" in flags else Data.DENSE,
            seed=seed,
        )
        if case.id != text:
            raise InvalidCase(f"id '{text}' is not in its one written form, which is '{case.id}'")
        return case


_ONLINE = "online"  # stands where the checkpoint format stands: a plain checkpoint, quantized while loading
_FLAGS = ("bias", "norenorm", "onin", "tight", "lattice")
_FIXED = 8
_NUMBER = r"\d{1,100}"  # int() refuses thousands of digits
ID_SHAPE = (
    "<weight>-<weight scale>-<act scale>-<checkpoint>-<activation>-<dtype>-e<E>k<k>m<M>h<H>i<I>-<routing>"
    "[-bias][-norenorm][-onin][-tight][-lattice][-s<seed>]"
)


def _bad_part(text: str, what: str, part: str, expected: str) -> InvalidCase:
    return InvalidCase(f"id '{text}': {what} '{part}' is not known; expected {expected}")


def _member(text: str, what: str, part: str, kind: type[_Member], *also: str) -> _Member:
    try:
        return kind(part)
    except ValueError:
        raise _bad_part(text, what, part, f"one of {', '.join((*kind, *also))}") from None


def _tail(text: str, parts: list[str]) -> tuple[set[str], int]:
    seed = 0
    flags: set[str] = set()
    for part in parts:
        number = re.fullmatch(rf"s(?!0)({_NUMBER})", part, re.ASCII)
        if number is not None:
            seed = int(number[1])
        elif part in _FLAGS:
            flags.add(part)
        else:
            raise _bad_part(text, "flag", part, f"one of {', '.join(_FLAGS)} or s<seed>")
    return flags, seed
