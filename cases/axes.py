"""The axes of a case, beside those of references/vocabulary.py."""

from __future__ import annotations

from enum import StrEnum


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
    DYNAMIC_GROUP16 = "dyngroup16"  # NVFP4: E4M3 scales of 16 columns under a static global scale
    DYNAMIC_GROUP32 = "dyngroup32"  # MX: E8M0 scales of 32 columns


class Routing(StrEnum):
    """Who goes where. One expert (never the last) is left empty whenever E >= k + 2."""

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
    BATCHED = "batched"  # the modular kernel over rows packed per expert, [E, max_num_tokens, H], without an all-to-all


class Level(StrEnum):
    """smoke is a subset of nightly, nightly of deep."""

    SMOKE = "smoke"
    NIGHTLY = "nightly"
    DEEP = "deep"
