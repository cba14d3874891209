"""The pairs that exact relations are asked of. No torch.

Every one has lattice data. Those that vLLM does not run as it should are among them: the ledger says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

from cases.case import Data, Entry, InvalidCase, Level, MoECase, Routing, entry_takes
from cases.doors import closed
from references.vocabulary import Activation, Format, Layout

Pair = tuple[MoECase, Entry]

# Sizes: e4k1m8h64i32 small; e8k1m2h192i96 naive block assignment, no tile filled; e5k2m3h96i80 tails; e4k4m3 every expert for every token;
# e1k1 one expert; m1 one token; m33 a second block of tokens; blocks: H 256 or I 256, two blocks of K in one of the GEMMs.
SMOKE: tuple[str, ...] = (
    # INT8: weights per tensor and per channel x activations static, per tensor and per token; blocks; weights only
    "int8-tensor-static-raw-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "int8-tensor-static-raw-relu2_no_mul-fp16-e5k2m3h96i80-balanced-lattice",
    "int8-channel-static-raw-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "int8-channel-static-raw-relu2_no_mul-fp32-e5k2m3h96i80-balanced-lattice",
    "int8-tensor-dyntensor-raw-silu-fp32-e4k1m8h64i32-balanced-lattice",
    "int8-channel-dyntensor-raw-silu_no_mul-fp32-e4k2m8h64i32-balanced-lattice",
    "int8-tensor-dyntoken-raw-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "int8-tensor-dyntoken-raw-relu2_no_mul-fp16-e8k1m2h192i96-balanced-lattice",
    "int8-channel-dyntoken-ct-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "int8-channel-dyntoken-ct-silu-fp32-e4k4m3h64i32-balanced-lattice",
    "int8-channel-dyntoken-quark-relu2_no_mul-fp16-e8k1m2h192i96-balanced-lattice",
    "int8-channel-dyntoken-ct-gelu-bf16-e1k1m3h64i32-balanced-lattice",
    "int8-channel-dyntoken-raw-silu-bf16-e5k3m3h96i80-balanced-bias-lattice",
    "int8-channel-dyntoken-ct-silu-bf16-e4k1m8h64i32-balanced-norenorm-onin-lattice",
    "int8-block128-dyngroup128-raw-silu-bf16-e4k1m8h256i128-balanced-lattice",
    "int8-block128-dyngroup128-raw-silu_no_mul-fp16-e3k2m2h128i256-balanced-lattice",
    "int8-tensor-none-raw-silu-fp16-e4k1m8h64i32-balanced-lattice",
    "int8-channel-none-raw-relu2_no_mul-bf16-e5k2m3h96i80-balanced-lattice",
    "int8-channel-none-online-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "int8-channel-none-online-relu2_no_mul-fp16-e4k2m8h64i32-balanced-lattice",
    # FP8, the same
    "e4m3fn-tensor-static-ct-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "e4m3fn-tensor-static-quark-relu2_no_mul-fp16-e4k2m3h96i80-balanced-lattice",
    "e4m3fn-channel-static-raw-relu2_no_mul-bf16-e4k1m8h64i32-balanced-lattice",
    "e4m3fn-tensor-dyntensor-vllmfp8-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "e4m3fn-channel-dyntensor-raw-silu-bf16-e4k2m8h64i32-balanced-lattice",
    "e4m3fn-tensor-dyntoken-raw-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "e4m3fn-channel-dyntoken-ct-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "e4m3fn-channel-dyntoken-ct-silu_no_mul-fp32-e8k4m33h64i32-balanced-lattice",
    "e4m3fn-channel-dyntoken-quark-gelu_tanh-fp16-e2k1m1h96i80-balanced-lattice",
    "e4m3fn-block128-dyngroup128-ct-silu-bf16-e4k1m8h256i128-balanced-lattice",
    "e4m3fn-block128-dyngroup128-vllmfp8-gelu-fp16-e3k2m2h128i256-balanced-lattice",
    "e4m3fn-tensor-dyntensor-online-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "e4m3fn-channel-dyntoken-online-silu-fp16-e4k2m8h64i32-balanced-lattice",
    "e4m3fn-block128-dyngroup128-online-silu-bf16-e3k1m2h256i128-balanced-lattice",
    # unquantized, and what remains exact where an activation stands in the way
    "bf16-none-none-plain-silu-bf16-e4k1m8h64i32-balanced-bias-lattice",
    "fp16-none-none-plain-relu2_no_mul-fp16-e8k1m2h192i96-balanced-norenorm-onin-lattice",
    "fp32-none-none-plain-silu-fp32-e4k2m8h64i32-balanced-lattice",
    "fp32-none-none-plain-gelu-fp32-e4k1m3h64i32-balanced-lattice",
)

_SIZES = {
    False: ((4, 1, 8, 64, 32), (5, 2, 3, 96, 80), (8, 1, 2, 192, 96), (8, 4, 33, 128, 64)),
    True: ((4, 1, 8, 256, 128), (3, 2, 5, 128, 256)),
}
_ACTIVATIONS = (Activation.SILU, Activation.GELU, Activation.SILU_NO_MUL, Activation.RELU2_NO_MUL)


@cache
def lattice_pairs(level: Level) -> tuple[Pair, ...]:
    """(case, entry) of a level, sorted by case id and entry, each once."""
    found = {pair for text in SMOKE for pair in _doors(MoECase.from_id(text))}
    if level is not Level.SMOKE:
        found.update(_nightly())
    return tuple(sorted(found, key=lambda pair: (pair[0].id, pair[1])))


def lattice_cases(level: Level) -> tuple[MoECase, ...]:
    """The cases of a level, sorted by id, each once."""
    return tuple(dict.fromkeys(case for case, _ in lattice_pairs(level)))


def _nightly() -> Iterator[Pair]:
    """Every scheme x activation x hidden dtype x size."""
    from cases.generate import SCHEMES

    for scheme, activation, dtype in product(SCHEMES, _ACTIVATIONS, (Format.BF16, Format.FP16, Format.FP32)):
        weight = dtype if scheme.weight is None else scheme.weight
        for experts, top_k, tokens, hidden, intermediate in _SIZES[scheme.weight_scale is Layout.BLOCK128]:
            try:
                case = MoECase(
                    experts=experts,
                    top_k=top_k,
                    tokens=tokens,
                    hidden=hidden,
                    intermediate=intermediate,
                    dtype=dtype,
                    weight=weight,
                    weight_scale=scheme.weight_scale,
                    act_scale=scheme.act_scale,
                    checkpoint=scheme.checkpoint,
                    origin=scheme.origin,
                    activation=activation,
                    routing=Routing.BALANCED,
                    data=Data.LATTICE,
                )
            except InvalidCase:  # online quantization of fp32 weights
                continue
            yield from _doors(case)


def _doors(case: MoECase) -> Iterator[Pair]:
    return ((case, entry) for entry in Entry if entry_takes(case, entry) and closed(case, entry) is None)
