"""Checks that only a GPU can fail: names, claims, where they are asked. No torch: tests are collected from here.

How they are asked is in device_asked.py, how a subject does what they need in subject/modes.py.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from cases.case import ActScale, Data, Entry, Level, MoECase, Origin
from cases.generate import pairs
from harness import repeatable
from harness.backends import SPECS, Backend, declared_refusal, has_entry
from harness.pairs import Pair
from harness.recipes import recipe, written
from references.vocabulary import Activation, CheckpointFormat, Format, Layout

if TYPE_CHECKING:
    from harness.suite.options import Options


class DeviceCheck(StrEnum):
    """Closed. Values are what test ids and records say."""

    POISONED_MEMORY = "poisoned_memory"
    LAGGING_STREAM = "lagging_stream"
    REPLAYED_GRAPH = "replayed_graph"
    REPLAYED_SCALES = "replayed_scales"
    COMPILED = "compiled"
    COMPILED_SCALES = "compiled_scales"
    SWAPPED_OPERANDS = "swapped_operands"
    REPEATED_RUNS = "repeated_runs"
    FAR_EXPERT = "far_expert"
    FAR_ROWS = "far_rows"


CLAIMS: dict[DeviceCheck, str] = {
    DeviceCheck.POISONED_MEMORY: "what fresh memory, workspaces and padding hold before a layer is loaded and run moves no bit",
    DeviceCheck.LAGGING_STREAM: "loaded, or run, on a stream of its own that lags behind the host, a layer gives the default stream's bits",
    DeviceCheck.REPLAYED_GRAPH: "a CUDA graph captured on one batch and replayed on another gives the bits of an eager run",
    DeviceCheck.REPLAYED_SCALES: "a CUDA graph replayed after weight scales changed in place gives the bits of eager with the new scales",
    DeviceCheck.COMPILED: "torch.compile(fullgraph=True) gives the bits of an eager run, on another batch too",
    DeviceCheck.COMPILED_SCALES: "a compiled function, after weight scales changed in place, gives the bits of eager with the new scales",
    DeviceCheck.SWAPPED_OPERANDS: "the FP8 path that swaps the operands of small batches gives the other's bits, or both are allowed",
    DeviceCheck.REPEATED_RUNS: "many runs on one batch, other batches between them, give the same bits",
    DeviceCheck.FAR_EXPERT: "an expert whose weights begin past 2^31 elements gives the bits of its copy near the start",
    DeviceCheck.FAR_ROWS: "rows of an intermediate past 2^31 elements give the bits of the same tokens near the start",
}

FAR = (DeviceCheck.FAR_EXPERT, DeviceCheck.FAR_ROWS)  # gigabytes: nightly only
_WHOLE_GRAPH = (DeviceCheck.REPLAYED_GRAPH, DeviceCheck.REPLAYED_SCALES, DeviceCheck.COMPILED, DeviceCheck.COMPILED_SCALES)
SWAPPING = (Backend.TRITON, Backend.CUTLASS)

_FAR_SCHEMES = (  # of bytes, one per layout of weight scales
    (Layout.TENSOR, ActScale.STATIC_TENSOR),
    (Layout.CHANNEL, ActScale.DYNAMIC_TOKEN),
    (Layout.BLOCK128, ActScale.DYNAMIC_GROUP128),
)

# Where bits may differ by place, of a row in its batch or of an expert in its layer, and why. Each must then be one the reference allows.
_TILES = "where a tile lies among the blocks decides how its K is divided among them"
BY_PLACE = {Backend.MARLIN: _TILES, Backend.HUMMING: _TILES, Backend.HUMMING_A8: _TILES}


def asked(case: MoECase, entry: Entry, backend: Backend, level: Level) -> tuple[DeviceCheck, ...]:
    """The checks of one pair."""
    return tuple(check for check in DeviceCheck if why_not(check, case, entry, backend, level) is None)


def why_not(check: DeviceCheck, case: MoECase, entry: Entry, backend: Backend, level: Level) -> str | None:
    """Why a check is not asked of a pair; None when it must hold."""
    if not SPECS[backend].needs_gpu:
        return "the backend has no device"
    if entry is Entry.BATCHED and check in _WHOLE_GRAPH:
        return "the batched entry's packing reads on the host how many rows each expert has"
    if check is not DeviceCheck.REPEATED_RUNS and (why := repeatable.why_not(case, entry, backend)):
        return why
    if entry is Entry.BATCHED and check is DeviceCheck.FAR_ROWS:
        return "eight contributions are added in no order, in the hidden dtype"
    if check in FAR and level is Level.SMOKE:
        return "it takes gigabytes, and seconds"
    if check in FAR and (case.weight not in (Format.INT8, Format.E4M3FN) or (case.weight_scale, case.act_scale) not in _FAR_SCHEMES):
        return "offsets are those of another scheme"
    if check in FAR and case.origin is not Origin.PREQUANTIZED:
        return "offsets are those of the same codes, loaded"
    if check in (DeviceCheck.REPLAYED_SCALES, DeviceCheck.COMPILED_SCALES) and not case.quantized:
        return "weights have no scales"
    if check in (DeviceCheck.REPLAYED_SCALES, DeviceCheck.COMPILED_SCALES) and (why := _out_of_reach(case, backend)):
        return why
    if check is DeviceCheck.SWAPPED_OPERANDS and not _swaps(case, entry, backend):
        return "the path does not swap operands"
    return None


def _out_of_reach(case: MoECase, backend: Backend) -> str:
    """Why the scales that a loaded layer shows are not what its kernels read; nothing where they are."""
    if case.checkpoint is CheckpointFormat.GPT_OSS and backend in (Backend.TRITON, Backend.TRITON_UNFUSED):
        return "triton_kernels keeps the scales in objects of its own"
    if backend is Backend.EMULATION and case.weight in (Format.INT4, Format.UINT4):
        return "the weights were multiplied by the scales while they were loaded"
    return ""


def _swaps(case: MoECase, entry: Entry, backend: Backend) -> bool:
    """CUTLASS's W4A8 swaps them whatever the batch (``cutlass_moe.py``, run_cutlass_moe_w4a8_fp8), so that it has no other run."""
    a1 = recipe(case, entry, backend).a1
    return backend in SWAPPING and a1 is not None and a1.format is Format.E4M3FN and case.weight is Format.E4M3FN


class Checked(NamedTuple):
    """A check asked of a pair."""

    check: DeviceCheck
    pair: Pair

    @property
    def id(self) -> str:
        """``check:case[entry]``."""
        return f"{self.check}:{self.pair.id}"


def checks(options: Options) -> tuple[Checked, ...]:
    """The checks of the level, or of those of its pairs that were named. A fake has no device."""
    found = of(options.level, options.backend) if options.subject == "vllm" else ()
    through = [each for each in found if options.entry in (None, each.pair.entry)]
    return tuple(each for each in through if not options.cases or each.pair.case.id in options.cases)


def of(level: Level, backend: Backend) -> tuple[Checked, ...]:
    """The checks of a level."""
    pairs = chosen(level, backend)
    return tuple(Checked(check, pair) for pair in pairs for check in asked(pair.case, pair.entry, backend, level))


def chosen(level: Level, backend: Backend) -> tuple[Pair, ...]:
    """The plainest dense smoke pair of each scheme, origin and entry that runs there; in nightly, of each checkpoint format too."""
    if not SPECS[backend].needs_gpu:
        return ()
    groups: dict[tuple[object, ...], list[Pair]] = {}
    for case, entry in pairs(Level.SMOKE):
        runs = has_entry(entry, backend) and declared_refusal(case, entry, backend) is None and written(case, entry, backend)
        if case.data is Data.DENSE and runs:
            key = (entry, case.weight, case.weight_scale, case.act_scale, case.origin)
            groups.setdefault(key if level is Level.SMOKE else (*key, case.checkpoint), []).append(Pair(case, entry))
    found = [min(group, key=lambda pair: _oddities(pair.case)) for group in groups.values()]
    return tuple(pair for pair in found if pair.case.quantized or pair.case.weight is Format.BF16)


def _oddities(case: MoECase) -> tuple[bool, ...]:
    return (
        case.dtype is not Format.BF16,
        case.router_weight_on_input,
        case.bias,
        case.activation is not Activation.SILU,
        case.tokens == 1,
    )
