"""The pairs that exact relations are asked of. No torch.

Every one has lattice data. Those that vLLM does not run as it should are among them: the ledger says which.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, cast

from cases.case import ActScale, Data, Entry, Level, MoECase, Origin, Routing, entry_takes
from cases.doors import DOORS, closed
from cases.pairwise import covering
from references.vocabulary import Activation, Format, Layout

if TYPE_CHECKING:
    from cases.generate import Scheme

Pair = tuple[MoECase, Entry]
_Sizes = tuple[tuple[int, int, int, int, int], tuple[int, int, int, int, int]]

# Sizes: e4k1m8h64i32 small; e8k1m2h192i96 naive block assignment, no tile filled; e5k2m3h96i80 tails; e4k4m3 every expert for every token;
# e1k1 one expert; m1 one token; m33 a second block of tokens; blocks: H 256 or I 256, two blocks of K in one of the GEMMs.
SMOKE: tuple[str, ...] = (
    # INT8: weights per tensor and per channel x activations static, per tensor and per token; blocks; weights only
    "int8-tensor-static-raw-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "int8-tensor-static-raw-relu2_no_mul-fp16-e5k2m3h96i80-balanced-lattice",
    "int8-channel-static-raw-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "int8-channel-static-raw-relu2_no_mul-fp32-e5k2m3h96i80-balanced-lattice",
    "int8-tensor-dyntensor-raw-silu-fp32-e4k1m8h64i32-balanced-lattice",
    "int8-channel-dyntensor-raw-silu-fp32-e4k1m8h64i32-balanced-lattice",
    "int8-channel-dyntensor-raw-silu_no_mul-fp32-e4k2m8h64i32-balanced-lattice",
    "int8-tensor-dyntoken-raw-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "int8-tensor-dyntoken-raw-relu2_no_mul-fp16-e8k1m2h192i96-balanced-lattice",
    "int8-channel-dyntoken-ct-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "int8-channel-dyntoken-ct-silu-fp32-e4k4m3h64i32-balanced-lattice",
    "int8-channel-dyntoken-quark-relu2_no_mul-fp16-e8k1m2h192i96-balanced-lattice",
    "int8-channel-dyntoken-ct-gelu-bf16-e1k1m3h64i32-balanced-lattice",
    "int8-channel-dyntoken-raw-silu-bf16-e5k3m3h96i80-balanced-bias-lattice",
    "int8-channel-dyntoken-ct-silu-bf16-e4k1m8h64i32-balanced-norenorm-onin-lattice",
    "int8-block128-dyngroup128-raw-silu-bf16-e3k1m3h256i128-balanced-lattice",
    "int8-block128-dyngroup128-raw-silu_no_mul-fp16-e3k2m2h256i256-balanced-lattice",
    "int8-tensor-none-raw-silu-fp16-e4k1m8h64i32-balanced-lattice",
    "int8-channel-none-raw-relu2_no_mul-bf16-e5k2m3h64i48-balanced-lattice",
    "int8-channel-none-online-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "int8-channel-none-online-relu2_no_mul-fp16-e4k2m8h64i32-balanced-lattice",
    # FP8, the same
    "e4m3fn-tensor-static-ct-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "e4m3fn-tensor-static-quark-relu2_no_mul-fp16-e4k2m3h96i80-balanced-lattice",
    "e4m3fn-channel-static-raw-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "e4m3fn-channel-static-raw-relu2_no_mul-bf16-e8k1m2h96i80-balanced-lattice",
    "e4m3fn-tensor-dyntensor-vllmfp8-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "e4m3fn-channel-dyntensor-raw-silu-bf16-e4k2m8h64i32-balanced-lattice",
    "e4m3fn-tensor-dyntoken-raw-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "e4m3fn-channel-dyntoken-ct-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "e4m3fn-channel-dyntoken-ct-silu_no_mul-fp32-e8k4m33h64i32-balanced-lattice",
    "e4m3fn-channel-dyntoken-quark-gelu_tanh-fp16-e2k1m1h96i80-balanced-lattice",
    "e4m3fn-block128-dyngroup128-ct-silu-bf16-e3k1m3h256i128-balanced-lattice",
    "e4m3fn-block128-dyngroup128-vllmfp8-gelu-fp16-e3k2m2h128i256-balanced-lattice",
    "e4m3fn-tensor-dyntensor-online-silu-bf16-e4k1m8h64i32-balanced-lattice",
    "e4m3fn-channel-dyntoken-online-silu-fp16-e4k2m8h64i32-balanced-lattice",
    "e4m3fn-block128-dyngroup128-online-silu-bf16-e3k1m2h256i128-balanced-lattice",
    # unquantized, and what remains exact where an activation stands in the way
    "bf16-none-none-plain-silu-bf16-e4k1m8h64i32-balanced-bias-lattice",
    "fp16-none-none-plain-relu2_no_mul-fp16-e8k1m2h192i96-balanced-norenorm-onin-lattice",
    "fp32-none-none-plain-silu-fp32-e5k2m3h96i80-balanced-lattice",
    "fp32-none-none-plain-gelu-fp32-e4k1m3h64i32-balanced-lattice",
)

# E, k, M, H, I beside whole blocks of the same kind
_SIZES = (
    ((4, 1, 8, 64, 32), (4, 1, 8, 256, 128)),
    ((5, 2, 3, 96, 80), (3, 2, 5, 128, 256)),  # tails
    ((8, 1, 2, 192, 96), (8, 1, 2, 128, 128)),  # naive block assignment
    ((8, 4, 33, 128, 64), (4, 2, 33, 128, 128)),
    ((4, 4, 1, 64, 32), (2, 2, 1, 128, 128)),  # one token, k = E, a power of two: the layer divides by it
)
_ACTIVATIONS = (Activation.SILU, Activation.GELU, Activation.SILU_NO_MUL, Activation.RELU2_NO_MUL)
_DTYPES = (Format.BF16, Format.FP16, Format.FP32)
_DTYPE_AXIS, _INPUT_AXIS = 3, 5
_FORMATS = (None, Format.INT8, Format.E4M3FN)  # what lattices are laid out for


@cache
def lattice_pairs(level: Level) -> tuple[Pair, ...]:
    """(case, entry) of a level, sorted by case id and entry, each once."""
    found = {pair for text in SMOKE for pair in doors(MoECase.from_id(text))}
    if level is not Level.SMOKE:
        found.update(_nightly())
    return tuple(sorted(found, key=lambda pair: (pair[0].id, pair[1])))


def lattice_cases(level: Level) -> tuple[MoECase, ...]:
    """The cases of a level, sorted by id, each once."""
    return tuple(dict.fromkeys(case for case, _ in lattice_pairs(level)))


def axes() -> tuple[tuple[Hashable, ...], ...]:
    """What nightly varies: scheme, size, activation, hidden dtype, bias, router weight on the input."""
    from cases.generate import SCHEMES

    schemes = tuple(scheme for scheme in SCHEMES if scheme.weight in _FORMATS)
    return schemes, _SIZES, _ACTIVATIONS, _DTYPES, (False, True), (False, True)


def case_of(row: Sequence[Hashable]) -> MoECase:
    """One value of each axis. Raises InvalidCase where they do not go together."""
    scheme, sizes, activation, dtype, bias, on_input = cast("tuple[Scheme, _Sizes, Activation, Format, bool, bool]", tuple(row))
    experts, top_k, tokens, hidden, intermediate = sizes[scheme.weight_scale is Layout.BLOCK128]
    return MoECase(
        experts=experts,
        top_k=top_k,
        tokens=tokens,
        hidden=hidden,
        intermediate=intermediate,
        dtype=dtype,
        weight=scheme.weight or dtype,
        weight_scale=scheme.weight_scale,
        act_scale=scheme.act_scale,
        checkpoint=scheme.checkpoint,
        origin=scheme.origin,
        activation=activation,
        bias=bias,
        renormalize=not on_input,
        router_weight_on_input=on_input,
        routing=Routing.BALANCED,
        data=Data.LATTICE,
    )


def _nightly() -> Iterator[Pair]:
    """Every scheme with every size; every two values of any two axes together somewhere; every relation of every scheme somewhere."""
    for row in covering(axes(), allowed):
        yield from doors(case_of(row))
    for scheme, on_input in product(axes()[0], (False, True)):
        dtype = next(dtype for dtype in _DTYPES if allowed(0, scheme, _DTYPE_AXIS, dtype))
        yield from doors(case_of((scheme, _SIZES[0], Activation.SILU, dtype, False, on_input)))


def allowed(axis: int, value: Hashable, later: int, other: Hashable) -> bool:
    """Whether a value of one axis goes with a value of a later one."""
    if (axis, later) == (0, _DTYPE_AXIS):
        scheme = cast("Scheme", value)
        only_fp32 = scheme.weight is Format.INT8 and scheme.act_scale is ActScale.DYNAMIC_TENSOR  # doors.py
        return other is not Format.FP32 if scheme.origin is Origin.ONLINE else other is Format.FP32 or not only_fp32
    if (axis, later) == (1, _INPUT_AXIS):
        return other is False or all(top_k == 1 for _, top_k, *_ in cast("_Sizes", value))
    return True


def doors(case: MoECase) -> Iterator[Pair]:
    """The case through each entry that takes it and that vLLM does not keep shut."""
    return ((case, entry) for entry in DOORS if entry_takes(case, entry) and closed(case, entry) is None)
