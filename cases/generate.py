"""Which pairs each level holds: pairwise over the axes, plus named boundaries. No torch, no randomness, no environment."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cache
from itertools import product
from typing import NamedTuple, cast

from cases import packed
from cases.boundaries import NIGHTLY_BOUNDARIES, SMOKE_BOUNDARIES
from cases.case import ActScale, Entry, Level, MoECase, Origin, Routing, entry_takes
from cases.doors import DOORS, closed
from cases.pairwise import covering
from references.vocabulary import Activation, CheckpointFormat, Format, Layout

Pair = tuple[MoECase, Entry]


class Scheme(NamedTuple):
    """What is quantized how, and in which file. ``weight`` None: unquantized."""

    weight: Format | None
    weight_scale: Layout
    act_scale: ActScale
    checkpoint: CheckpointFormat
    origin: Origin = Origin.PREQUANTIZED


class Size(NamedTuple):
    """E, k, M, H, I. Pre-quantized block schemes round H and I up to whole blocks."""

    experts: int
    top_k: int
    tokens: int
    hidden: int
    intermediate: int


class RouterWeights(StrEnum):
    """How router weights reach the output."""

    RENORMALIZED = "renormalized"
    SOFTMAX = "softmax"
    ON_INPUT = "on_input"  # softmax weights on the input; k = 1


_CT, _QUARK, _VLLM_FP8 = CheckpointFormat.COMPRESSED_TENSORS, CheckpointFormat.QUARK, CheckpointFormat.VLLM_FP8
_RAW, _PLAIN = CheckpointFormat.RAW, CheckpointFormat.PLAIN
_INT8, _E4M3 = Format.INT8, Format.E4M3FN
_TENSOR, _CHANNEL, _BLOCK = Layout.TENSOR, Layout.CHANNEL, Layout.BLOCK128
_STATIC, _DYN_TENSOR, _DYN_TOKEN = ActScale.STATIC_TENSOR, ActScale.DYNAMIC_TENSOR, ActScale.DYNAMIC_TOKEN
_DYN_GROUP, _NO_ACT = ActScale.DYNAMIC_GROUP128, ActScale.NONE

SCHEMES: tuple[Scheme, ...] = (
    Scheme(None, Layout.NONE, _NO_ACT, _PLAIN, Origin.UNQUANTIZED),
    # INT8, the full product of weight and activation granularity: kernels took one for the other (vllm#58532)
    *(Scheme(_INT8, w, a, _QUARK) for w in (_TENSOR, _CHANNEL) for a in (_STATIC, _DYN_TENSOR, _DYN_TOKEN)),
    Scheme(_INT8, _CHANNEL, _DYN_TOKEN, _CT),
    Scheme(_INT8, _BLOCK, _DYN_GROUP, _RAW),
    Scheme(_INT8, _TENSOR, _NO_ACT, _RAW),
    Scheme(_INT8, _CHANNEL, _NO_ACT, _RAW),
    # FP8, the same product; Quark's file can say all of it
    *(Scheme(_E4M3, w, a, _QUARK) for w in (_TENSOR, _CHANNEL) for a in (_STATIC, _DYN_TENSOR, _DYN_TOKEN)),
    Scheme(_E4M3, _BLOCK, _DYN_GROUP, _QUARK),
    # FP8 in the other files, each as its exporter writes it
    Scheme(_E4M3, _TENSOR, _STATIC, _CT),
    Scheme(_E4M3, _CHANNEL, _DYN_TOKEN, _CT),
    Scheme(_E4M3, _BLOCK, _DYN_GROUP, _CT),
    Scheme(_E4M3, _TENSOR, _STATIC, _VLLM_FP8),
    Scheme(_E4M3, _TENSOR, _DYN_TENSOR, _VLLM_FP8),
    Scheme(_E4M3, _BLOCK, _DYN_GROUP, _VLLM_FP8),
    # quantized while loading: the layer is the only door
    Scheme(_E4M3, _TENSOR, _DYN_TENSOR, _PLAIN, Origin.ONLINE),
    Scheme(_E4M3, _CHANNEL, _DYN_TOKEN, _PLAIN, Origin.ONLINE),
    Scheme(_E4M3, _BLOCK, _DYN_GROUP, _PLAIN, Origin.ONLINE),
    Scheme(_INT8, _CHANNEL, _NO_ACT, _PLAIN, Origin.ONLINE),
)

PACKED_SCHEMES: tuple[Scheme, ...] = (
    *(
        Scheme(weight, group, act, stored)
        for (weight, group, act), files in packed.SCHEMES.items()
        for stored in sorted(files - {_RAW, CheckpointFormat.GPT_OSS})
    ),
    *(Scheme(weight, group, act, _PLAIN, Origin.ONLINE) for (weight, group), act in packed.ONLINE.items()),
    Scheme(_E4M3, _TENSOR, _STATIC, CheckpointFormat.MODELOPT),
)

BATCHED_SCHEMES: tuple[Scheme, ...] = (  # through the batched entry; what it refuses is in boundaries.py
    Scheme(None, Layout.NONE, _NO_ACT, _PLAIN, Origin.UNQUANTIZED),
    *(Scheme(_E4M3, _TENSOR, a, _RAW) for a in (_STATIC, _DYN_TENSOR, _DYN_TOKEN)),
    Scheme(_E4M3, _CHANNEL, _DYN_TOKEN, _RAW),
    Scheme(_E4M3, _BLOCK, _DYN_GROUP, _RAW),
)

# where activations with parameters are asked: one scheme for each way to the activation and on from it
PARAMETER_SCHEMES: tuple[Scheme, ...] = (
    Scheme(None, Layout.NONE, _NO_ACT, _PLAIN, Origin.UNQUANTIZED),
    Scheme(_INT8, _CHANNEL, _DYN_TOKEN, _CT),
    Scheme(_E4M3, _CHANNEL, _DYN_TOKEN, _CT),
    Scheme(_E4M3, _BLOCK, _DYN_GROUP, _CT),
    Scheme(Format.UINT4, Layout.GROUP32, _NO_ACT, _CT),
    Scheme(Format.E2M1, Layout.GROUP16, ActScale.DYNAMIC_GROUP16, CheckpointFormat.MODELOPT),
)
PARAMETERS: tuple[tuple[Activation, bool], ...] = (  # small limits or not
    (Activation.GELU_TANH_NO_MUL, False),
    (Activation.SILU, True),
    (Activation.SWIGLUOAI_UNINTERLEAVE, False),
    (Activation.SWIGLUOAI_UNINTERLEAVE, True),
    (Activation.SWIGLUSTEP, False),
    (Activation.SITU, False),
    (Activation.SITU, True),
)
INTERLEAVED_SCHEMES: tuple[Scheme, ...] = (
    Scheme(None, Layout.NONE, _NO_ACT, _PLAIN, Origin.UNQUANTIZED),
    Scheme(_E4M3, _CHANNEL, _DYN_TOKEN, _PLAIN, Origin.ONLINE),
    Scheme(Format.E2M1, Layout.GROUP32, _NO_ACT, CheckpointFormat.GPT_OSS),
)

# Small enough for an interpreter, odd enough to show tails: H, I and M beside the tiles of 16, 64 and 128
SMOKE_SIZES = (
    Size(4, 2, 8, 128, 64),
    Size(4, 1, 17, 64, 32),
    Size(8, 2, 33, 128, 32),
    Size(5, 3, 3, 192, 96),  # neither H nor I a multiple of a 128 tile
    Size(2, 1, 1, 256, 128),  # one token
    Size(3, 2, 2, 128, 128),
    Size(8, 1, 2, 96, 160),  # M * k * 4 <= E: one block per token, no alignment; I > H
    Size(5, 5, 3, 64, 32),  # every expert for every token
    Size(8, 4, 17, 256, 64),
    Size(3, 1, 33, 96, 48),  # M over 32: the next block height
    Size(4, 3, 17, 80, 128),
)
PACKED_SMOKE_SIZES = (Size(4, 2, 8, 128, 64), Size(4, 1, 17, 64, 32), Size(5, 3, 3, 192, 96))  # rounded up to whole groups
PACKED_NIGHTLY_SIZES = (Size(8, 2, 33, 256, 128), Size(5, 3, 17, 192, 96), Size(40, 4, 3, 128, 64), Size(3, 1, 129, 96, 160))
BATCHED_SMOKE_SIZES = (*SMOKE_SIZES[:5], SMOKE_SIZES[6])
NIGHTLY_SIZES = (
    Size(8, 2, 33, 256, 128),
    Size(5, 3, 17, 192, 96),
    Size(40, 4, 17, 128, 64),
    Size(60, 2, 3, 64, 32),
    Size(8, 4, 129, 128, 64),  # the next block height
    Size(3, 1, 33, 320, 80),
)
DEEP_SIZES = (
    Size(8, 2, 257, 512, 256),
    Size(60, 8, 129, 256, 128),
    Size(128, 8, 33, 128, 64),
    Size(4, 2, 65, 2048, 64),  # many K tiles in GEMM 1
    Size(4, 2, 65, 128, 1024),  # and in GEMM 2
)

_ACTIVATIONS = (
    Activation.SILU,
    Activation.GELU,
    Activation.GELU_TANH,
    Activation.SILU_NO_MUL,
    Activation.GELU_NO_MUL,
    Activation.RELU2_NO_MUL,
)
_DTYPES = (Format.BF16, Format.FP16, Format.FP32)
_HALVES = (Format.BF16, Format.FP16)
_BIAS = (False, True)
# what a smaller smoke leaves to nightly
_PACKED_ACTIVATIONS = (Activation.SILU, Activation.GELU_TANH, Activation.RELU2_NO_MUL)
_PACKED_ROUTINGS = (Routing.BALANCED, Routing.SKEWED)
_NIGHTLY_ONLY = {
    *((weight, Layout.GROUP64) for weight in packed.INTEGERS),
    *((weight, Layout.GROUP32) for weight in (_INT8, Format.UINT8)),
}
_AXES = (_ACTIVATIONS, _DTYPES, _BIAS, tuple(RouterWeights), tuple(Routing))
_PACKED = frozenset(PACKED_SCHEMES)
_DTYPE_AXIS = 3  # after the schemes and the sizes


@cache
def pairs(level: Level) -> tuple[Pair, ...]:
    """(case, entry) of a level, sorted by case id and entry, each once."""
    found = set(_smoke())
    if level is not Level.SMOKE:
        found.update(_nightly())
    if level is Level.DEEP:
        found.update(_deep())
    return tuple(sorted(found, key=lambda pair: (pair[0].id, pair[1])))


def cases(level: Level) -> tuple[MoECase, ...]:
    """The cases of a level, sorted by id, each once."""
    return tuple(dict.fromkeys(case for case, _ in pairs(level)))


def _smoke() -> Iterator[Pair]:
    """Every scheme with every size; every two values of any two axes together somewhere."""
    for row in covering((SCHEMES, SMOKE_SIZES, *_AXES), _allowed):
        yield from _doors(_case(row))
    schemes = tuple(scheme for scheme in PACKED_SCHEMES if (scheme.weight, scheme.weight_scale) not in _NIGHTLY_ONLY)
    axes = (schemes, PACKED_SMOKE_SIZES, _PACKED_ACTIVATIONS, _HALVES, _BIAS, tuple(RouterWeights), _PACKED_ROUTINGS)
    for row in covering(axes, _allowed):
        yield from _doors(_case(row))
    yield from _parameters(PACKED_SMOKE_SIZES, each=False)
    yield from _batched(BATCHED_SCHEMES, BATCHED_SMOKE_SIZES)
    for turn, parameters in enumerate(PARAMETERS):
        yield from _batched_parameters(BATCHED_SCHEMES[turn % len(BATCHED_SCHEMES)], [parameters])
    yield from _named(SMOKE_BOUNDARIES)


def _nightly() -> Iterator[Pair]:
    """The same within each scheme: every size with every activation, the other axes pairwise."""
    for scheme in SCHEMES:
        yield from _within(scheme, NIGHTLY_SIZES, seed=0)
    for scheme in PACKED_SCHEMES:
        yield from _within(scheme, PACKED_NIGHTLY_SIZES, seed=0)
    yield from _parameters(PACKED_NIGHTLY_SIZES, each=True)
    for scheme in BATCHED_SCHEMES:
        yield from _batched((scheme,), NIGHTLY_SIZES)
        yield from _batched_parameters(scheme, PARAMETERS)
    yield from _named(NIGHTLY_BOUNDARIES)


def _deep() -> Iterator[Pair]:
    """All sizes, other numbers."""
    for scheme in SCHEMES:
        yield from _within(scheme, SMOKE_SIZES + NIGHTLY_SIZES + DEEP_SIZES, seed=1)
    for scheme in PACKED_SCHEMES:
        yield from _within(scheme, PACKED_SMOKE_SIZES + PACKED_NIGHTLY_SIZES + DEEP_SIZES, seed=1)


def _parameters(sizes: Sequence[Size], *, each: bool) -> Iterator[Pair]:
    """Activations with parameters in every scheme that may have them, in every size or in one; the other axes take turns."""
    asked = [*product(PARAMETER_SCHEMES, PARAMETERS), *product(INTERLEAVED_SCHEMES, [(Activation.SWIGLUOAI, False)])]
    for turn, (scheme, (activation, tight)) in enumerate(asked):
        stacked = activation is Activation.SWIGLUOAI
        dtypes = _HALVES if scheme.checkpoint is not CheckpointFormat.GPT_OSS else _HALVES[:1]
        for number, size in enumerate(sizes if each else sizes[turn % len(sizes) :][:1], turn):
            bias = number % 2 == 1 and (not stacked or scheme.checkpoint is CheckpointFormat.GPT_OSS)
            weights = RouterWeights.RENORMALIZED if number % 3 else RouterWeights.SOFTMAX
            case = _case((scheme, size, activation, dtypes[number % len(dtypes)], bias, weights, Routing.BALANCED))
            yield from _doors(replace(case, tight=tight))


def _within(scheme: Scheme, sizes: Sequence[Size], seed: int) -> Iterator[Pair]:
    dtypes = tuple(dtype for dtype in _DTYPES if _allowed(0, scheme, _DTYPE_AXIS, dtype))
    axes = ((scheme,), sizes, *_AXES[:1], dtypes, *_AXES[2:])
    for row in covering(axes, _allowed):
        yield from _doors(_case(row, seed))


def _batched(schemes: Sequence[Scheme], sizes: Sequence[Size]) -> Iterator[Pair]:
    """Through the batched entry, which has no place for biases: every two values of any two other axes."""
    activations, dtypes, _, weights, routings = _AXES
    for row in covering((schemes, sizes, activations, dtypes, (False,), weights, routings), _allowed):
        yield _case(row), Entry.BATCHED


def _batched_parameters(scheme: Scheme, parameters: Sequence[tuple[Activation, bool]]) -> Iterator[Pair]:
    """Activations with parameters, through the batched entry; the hidden dtypes take turns."""
    for number, (activation, tight) in enumerate(parameters):
        row = (scheme, SMOKE_SIZES[0], activation, _HALVES[number % 2], False, RouterWeights.RENORMALIZED, Routing.BALANCED)
        yield replace(_case(row), tight=tight), Entry.BATCHED


def _doors(case: MoECase) -> Iterator[Pair]:
    """The entries that take the case and that vLLM is not known to keep shut; those are named in boundaries.py."""
    return ((case, entry) for entry in DOORS if entry_takes(case, entry) and closed(case, entry) is None)


def _named(ids: Sequence[tuple[str, tuple[Entry, ...]]]) -> Iterator[Pair]:
    return ((MoECase.from_id(text), entry) for text, entries in ids for entry in entries)


def _case(row: Sequence[Hashable], seed: int = 0) -> MoECase:
    scheme, size, activation, dtype, bias, weights, routing = cast(
        "tuple[Scheme, Size, Activation, Format, bool, RouterWeights, Routing]", tuple(row)
    )
    hidden, intermediate = size.hidden, size.intermediate
    if scheme.weight_scale is Layout.BLOCK128 and scheme.origin is Origin.PREQUANTIZED:
        hidden, intermediate = -(-hidden // 128) * 128, -(-intermediate // 128) * 128
    if scheme in _PACKED or scheme.checkpoint is CheckpointFormat.GPT_OSS:
        hidden, intermediate = (packed.rounded(scheme.weight_scale, scheme.act_scale, side) for side in (hidden, intermediate))
    return MoECase(
        experts=size.experts,
        top_k=size.top_k,
        tokens=size.tokens,
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
        renormalize=weights is RouterWeights.RENORMALIZED,
        router_weight_on_input=weights is RouterWeights.ON_INPUT,
        routing=routing,
        seed=seed,
    )


def _allowed(axis: int, value: Hashable, later: int, other: Hashable) -> bool:
    """Rules that tie two axes; the same that MoECase checks, asked before a case exists."""
    match (value, other):
        case (Scheme(origin=Origin.ONLINE), Format.FP32):
            return False
        case (Scheme() as scheme, Format.FP32):
            return scheme not in _PACKED
        case (Size() as size, RouterWeights.ON_INPUT):
            return size.top_k == 1
        case (Size() as size, Routing.ONE_EACH):
            return size.top_k < size.experts or size.tokens == 1
    return True
