"""One MoE layer, one way of quantizing it, one batch. Data only: no tensors, no torch, no vLLM names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from references.vocabulary import Activation, CheckpointFormat, Format, Layout


class InvalidCase(ValueError):
    """A case that cannot exist; the message says which rule it breaks and with which value."""


class Origin(StrEnum):
    """Where the codes come from."""

    UNQUANTIZED = "unquantized"
    PREQUANTIZED = "prequantized"  # the checkpoint holds codes and scales
    ONLINE = "online"  # vLLM quantizes hidden-dtype weights while loading


class ActScale(StrEnum):
    """How activations are scaled, independent of the weight's layout."""

    NONE = "none"  # weight-only, or unquantized
    STATIC_TENSOR = "static"
    DYNAMIC_TENSOR = "dyntensor"
    DYNAMIC_TOKEN = "dyntoken"
    DYNAMIC_GROUP128 = "dyngroup128"


class Routing(StrEnum):
    """Who goes where. One expert (not the last) is always left empty when E > k allows it."""

    BALANCED = "balanced"
    SKEWED = "skewed"  # most tokens on one expert
    ONE_EACH = "one_each"  # the last expert gets exactly one token
    SINGLE = "single"  # every token to the same top-k experts


class Data(StrEnum):
    """Which grid the numbers lie on."""

    DENSE = "dense"  # arbitrary values, compared within a derived bound
    LATTICE = "lattice"  # every sum exact in fp32, compared for equality


class Entry(StrEnum):
    """Which of vLLM's doors the case enters by."""

    LAYER = "layer"  # factory, load_weights, process_weights_after_loading, runner forward
    FUSED_EXPERTS = "fused_experts"  # the legacy functional entry with a quant config


class Level(StrEnum):
    """smoke is a subset of nightly, nightly of deep."""

    SMOKE = "smoke"
    NIGHTLY = "nightly"
    DEEP = "deep"


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
    routing: Routing = Routing.BALANCED
    data: Data = Data.DENSE
    seed: int = 0
