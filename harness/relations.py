"""Exact relations: what must happen to the bits of the output when something small is done to the layer or the batch.

Names, claims and exemptions. No torch: tests are collected from here. What a relation does is in relations_scales.py, relations_rows.py
and relations_formats.py; relations_check.py compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from cases.case import Entry, InvalidCase, MoECase, Origin, entry_takes
from cases.doors import closed
from cases.roles import empty_expert
from harness.backends import Backend, declared_refusal
from harness.recipes import recipe
from references.vocabulary import Accumulator, Activation, CheckpointFormat, Format, Layout, Recipe, RouterWeight


class Relation(StrEnum):
    """Closed. Values are what test ids and records say."""

    REFERENCE = "reference"
    REPEATED = "repeated"
    UNROUTED_SCALE = "unrouted_scale"
    DOWN_DOUBLES = "down_doubles"
    DOWN_SCALE = "down_scale"
    UP_MULTIPLIES = "up_multiplies"
    UP_SCALE = "up_scale"
    GATE_SCALE = "gate_scale"
    INPUT_SCALE = "input_scale"
    PERMUTED_EXPERTS = "permuted_experts"
    PERMUTED_TOKENS = "permuted_tokens"
    DROPPED_TOKENS = "dropped_tokens"
    MULTIPLIED_TOKENS = "multiplied_tokens"
    OTHER_FORMAT = "other_format"
    ONLINE_AS_PREQUANTIZED = "online_as_prequantized"
    WEIGHT_ON_INPUT = "weight_on_input"
    SCALE_VIEWS = "scale_views"


EXACT = (Backend.INTERPRETER, Backend.TRITON)  # lanes whose recipe the lattices are made for

CLAIMS: dict[Relation, str] = {
    Relation.REFERENCE: "every step is exact, so the output equals the reference's; where one is not, it lies in the reference's interval",
    Relation.REPEATED: "the same layer gives the same bits twice, loaded again, and after another layer was loaded and run",
    Relation.UNROUTED_SCALE: "a scale of an expert that no token is routed to moves nothing",
    Relation.DOWN_DOUBLES: "all w2 scales of one expert times f multiply that expert's tokens by exactly f and move nothing else",
    Relation.DOWN_SCALE: "one w2 scale moves only the output channels it scales, of that expert's tokens, to what the reference predicts",
    Relation.UP_MULTIPLIES: "all up scales of one expert times f multiply that expert's tokens by exactly f (f squared for relu2)",
    Relation.UP_SCALE: "an up scale moves only that expert's tokens, to what the reference predicts",
    Relation.GATE_SCALE: "a gate scale moves only that expert's tokens, to what the reference predicts",
    Relation.INPUT_SCALE: "a static activation scale moves what the reference predicts, and nothing when it is not the largest",
    Relation.PERMUTED_EXPERTS: "experts renumbered with their weights, scales and routing give the same bits",
    Relation.PERMUTED_TOKENS: "permuted tokens give the same rows, permuted",
    Relation.DROPPED_TOKENS: "the tokens that stay give the same rows when others are dropped",
    Relation.MULTIPLIED_TOKENS: "in a batch that holds every token several times each gives the same row, whatever path that size takes",
    Relation.OTHER_FORMAT: "the same numbers in another checkpoint format give the same bits",
    Relation.ONLINE_AS_PREQUANTIZED: "what the reference quantizes, loaded pre-quantized, gives the bits of online quantization",
    Relation.WEIGHT_ON_INPUT: "the router weight on the input equals hidden states multiplied by it beforehand",
    Relation.SCALE_VIEWS: "scales handed over in another shape or with other strides give the same bits, or are refused with a reason",
}


class Place(NamedTuple):
    """Where a relation is asked."""

    case: MoECase
    entry: Entry
    backend: Backend
    recipe: Recipe

    @classmethod
    def of(cls, case: MoECase, entry: Entry, backend: Backend) -> Place:
        """With the recipe that runs there."""
        return cls(case, entry, backend, recipe(case, entry, backend))


Holds = Callable[[Place], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """A relation that says nothing about a case, because the thing it speaks of is not there."""

    relation: Relation
    reason: str
    when: Holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Exemption:
    """A relation that legitimately does not hold. ``shown_by``: the pair in which it breaks without a fault, for the test."""

    relation: Relation
    reason: str
    when: Holds
    shown_by: tuple[str, Entry]


def coupled(recipe: Recipe) -> bool:
    """Whether a dynamic per-tensor scale makes every row depend on every other."""
    return any(how is not None and how.dynamic and how.layout is Layout.TENSOR for how in (recipe.a1, recipe.a2))


def unprovable(case: MoECase, recipe: Recipe) -> str | None:
    """Why the reference has no single answer even on a lattice, or None. What remains exact are the relations
    without a reference; those with one ask for its interval."""
    fp32 = case.dtype is Format.FP32
    if fp32 and case.activation in (Activation.GELU, Activation.GELU_TANH, Activation.GELU_NO_MUL):
        return "no accuracy bound says that erf and tanh reach 1 exactly, and fp32 keeps the difference"
    if recipe.accumulator is Accumulator.TENSOR_CORE_FP8 and not _fits_fourteen_bits(case):
        return "FP8 tensor cores keep 14 bits of a sum, and these sums may need more"
    squared = case.activation is Activation.RELU2_NO_MUL and recipe.a2 is not None and recipe.a2.dynamic
    if squared and case.weight is Format.INT8 and fp32:
        return "127 times a power of two is no square that fp32 holds, so a2 is no power of two"
    return None


def _fits_fourteen_bits(case: MoECase) -> bool:
    """Of the lattices, found by proving them: the small ones in bf16 whose activation leaves few bits."""
    few = case.activation in (Activation.SILU, Activation.SILU_NO_MUL, Activation.RELU2_NO_MUL)
    return max(case.hidden, case.intermediate) <= 64 and case.dtype is Format.BF16 and few


def _whole_blocks(case: MoECase) -> bool:
    return case.weight_scale is not Layout.BLOCK128 or case.hidden % 128 == case.intermediate % 128 == 0


def _small(case: MoECase) -> bool:
    return case.tokens <= 8 and max(case.hidden, case.intermediate) <= (256 if case.weight_scale is Layout.BLOCK128 else 64)


def _quantized_first(case: MoECase, recipe: Recipe) -> bool:
    """The codes are made before the router weight comes in, and a scale fixed or shared by rows does not take it up."""
    before = recipe.router_weight is RouterWeight.GEMM1 and case.weight is Format.INT8
    return before and recipe.a1 is not None and (not recipe.a1.dynamic or recipe.a1.layout is Layout.TENSOR)


def _absent(relation: Relation, reason: str, when: Callable[[MoECase], bool]) -> Absent:
    return Absent(relation=relation, reason=reason, when=lambda place: when(place.case))


ABSENT: tuple[Absent, ...] = (
    _absent(Relation.UNROUTED_SCALE, "every expert has a token", lambda case: empty_expert(case) is None),
    _absent(Relation.GATE_SCALE, "the layer is not gated", lambda case: not case.activation.gated),
    _absent(Relation.INPUT_SCALE, "activation scales are not static", lambda case: not case.static_input),
    _absent(Relation.PERMUTED_EXPERTS, "there is one expert", lambda case: case.experts == 1),
    _absent(Relation.PERMUTED_TOKENS, "there is one token", lambda case: case.tokens == 1),
    _absent(Relation.DROPPED_TOKENS, "there is one token", lambda case: case.tokens == 1),
    Absent(
        relation=Relation.OTHER_FORMAT,
        reason="no other checkpoint format holds the same numbers",
        when=lambda place: not other_formats(place),
    ),
    _absent(Relation.ONLINE_AS_PREQUANTIZED, "the weights are not quantized online", lambda case: case.origin is not Origin.ONLINE),
    _absent(Relation.ONLINE_AS_PREQUANTIZED, "pre-quantized blocks are whole", lambda case: not _whole_blocks(case)),
    _absent(Relation.WEIGHT_ON_INPUT, "the router weight is not on the input", lambda case: not case.router_weight_on_input),
    _absent(Relation.SCALE_VIEWS, "weights have no scales", lambda case: case.origin is Origin.UNQUANTIZED),
    Absent(
        relation=Relation.SCALE_VIEWS,
        reason="only the functional entry is handed scale tensors",
        when=lambda place: place.entry is not Entry.FUSED_EXPERTS,
    ),
    _absent(Relation.SCALE_VIEWS, "all forms of a scale tensor are tried on small layers", lambda case: not _small(case)),
)

_SIZE = "e4k1m8h64i32-balanced"
_DIRECT = Entry.FUSED_EXPERTS

EXEMPTIONS: tuple[Exemption, ...] = (
    Exemption(
        relation=Relation.DOWN_DOUBLES,
        reason="a token's other experts add what is not multiplied",
        when=lambda place: place.case.top_k > 1,
        shown_by=("int8-channel-dyntoken-ct-silu-bf16-e4k2m8h64i32-balanced-lattice", Entry.LAYER),
    ),
    Exemption(
        relation=Relation.DOWN_DOUBLES,
        reason="the bias is added after the scale",
        when=lambda place: place.case.bias,
        shown_by=(f"int8-channel-dyntoken-raw-silu-bf16-{_SIZE}-bias-lattice", _DIRECT),
    ),
    Exemption(
        relation=Relation.UP_MULTIPLIES,
        reason="a token's other experts add what is not multiplied",
        when=lambda place: place.case.top_k > 1,
        shown_by=("int8-channel-dyntoken-ct-silu-bf16-e4k2m8h64i32-balanced-lattice", Entry.LAYER),
    ),
    Exemption(
        relation=Relation.UP_MULTIPLIES,
        reason="the biases are added after the scales",
        when=lambda place: place.case.bias,
        shown_by=(f"int8-channel-dyntoken-raw-silu-bf16-{_SIZE}-bias-lattice", _DIRECT),
    ),
    Exemption(
        relation=Relation.UP_MULTIPLIES,
        reason="a static a2 scale does not follow the intermediate: other codes round differently, or saturate",
        when=lambda place: place.recipe.a2 is not None and not place.recipe.a2.dynamic,
        shown_by=(f"int8-tensor-static-raw-silu-bf16-{_SIZE}-lattice", _DIRECT),
    ),
    Exemption(
        relation=Relation.UP_MULTIPLIES,
        reason="a dynamic per-tensor a2 scale follows the largest row of all",
        when=lambda place: coupled(place.recipe),
        shown_by=(f"int8-tensor-dyntensor-raw-silu-fp32-{_SIZE}-lattice", _DIRECT),
    ),
    Exemption(
        relation=Relation.DROPPED_TOKENS,
        reason="a dynamic per-tensor scale depends on the tokens that are dropped",
        when=lambda place: coupled(place.recipe),
        shown_by=(f"int8-tensor-dyntensor-raw-silu-fp32-{_SIZE}-lattice-s1", _DIRECT),
    ),
    Exemption(
        relation=Relation.WEIGHT_ON_INPUT,
        reason="hidden states are quantized before the router weight is multiplied in, by a scale that does not follow it",
        when=lambda place: _quantized_first(place.case, place.recipe),
        shown_by=(f"int8-tensor-static-raw-silu-bf16-{_SIZE}-onin-lattice", _DIRECT),
    ),
    Exemption(
        relation=Relation.WEIGHT_ON_INPUT,
        reason="the legacy kernel multiplies the first GEMM's bias by the router weight too",
        when=lambda place: place.case.bias and place.recipe.router_weight is RouterWeight.GEMM1,
        shown_by=("e4m3fn-tensor-static-quark-relu2_no_mul-fp16-e4k1m8h64i32-balanced-bias-norenorm-onin-lattice", _DIRECT),
    ),
    Exemption(
        relation=Relation.WEIGHT_ON_INPUT,
        reason="a router's weight of 3/4 is one step off where it is not rounded to 16 bits: 1 + 1/3 is no float32",
        when=lambda place: place.entry is Entry.LAYER and place.case.dtype is Format.FP32,
        shown_by=("int8-channel-dyntoken-ct-gelu-fp32-e8k1m2h192i96-balanced-bias-norenorm-onin-lattice", Entry.LAYER),
    ),
)


def why_not(relation: Relation, place: Place) -> str | None:
    """Why the relation is not asked of a pair; None when it must hold."""
    rows: tuple[Absent | Exemption, ...] = (*ABSENT, *EXEMPTIONS)
    return next((row.reason for row in rows if row.relation is relation and row.when(place)), None)


def asked(case: MoECase, entry: Entry, backend: Backend) -> tuple[Relation, ...]:
    """The relations that must hold for a pair."""
    place = Place.of(case, entry, backend)
    return tuple(relation for relation in Relation if why_not(relation, place) is None)


def other_formats(place: Place) -> tuple[MoECase, ...]:
    """The same layer in the other checkpoint formats that the entry takes and that run by the same recipe."""
    found: list[MoECase] = []
    case, entry, backend = place.case, place.entry, place.backend
    if case.origin is not Origin.PREQUANTIZED:
        return ()
    for checkpoint in CheckpointFormat:
        try:
            other = replace(case, checkpoint=checkpoint)
        except InvalidCase:  # that format cannot say it
            continue
        runs = entry_takes(other, entry) and closed(other, entry) is None and declared_refusal(other, entry, backend) is None
        if checkpoint is not case.checkpoint and runs and recipe(other, entry, backend) == place.recipe:
            found.append(other)
    return tuple(found)
