"""A loader without vLLM, honest unless a named fault is put into it: parameters as vLLM names them, filled as a layer's loader does."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

import torch

from cases.case import Entry, Origin
from cases.checkpoint import make_checkpoint
from cases.packed import is_packed
from cases.sharding import slice_of
from cases.shards import Shard, whole_groups
from cases.spoil import SHARD
from harness.expected import experts as stored_experts
from harness.recipes import recipe
from harness.subject import Loaded, LoadFailed, fake_kernel
from harness.subject.allocations import fill
from harness.subject.fake import FakeSubject
from harness.subject.loading import Allocated, Depth, Handed, Loading
from references.formats import encode, torch_dtype
from references.shards import shard
from references.vocabulary import CheckpointFormat, Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cases.batch import Batch
    from cases.case import MoECase
    from cases.checkpoint import Checkpoint
    from harness.backends import Backend
    from harness.subject import Ran
    from references.moe import Projection


class LoadFault(Enum):
    """Closed. What has gone wrong, or could, between a checkpoint and a layer; each must be seen by an oracle."""

    HALVES_SWAPPED = "up rows are stored first, gate rows after"
    EXPERTS_SWAPPED = "two experts trade places"
    SCALE_DROPPED = "one expert's scales are never written"
    SCALE_OF_NEIGHBOUR = "one expert has the scales of the one before"
    UP_SCALE_IS_GATES = "gate's scale is written for both halves"
    NIBBLES_SWAPPED = "the two codes of a byte, or of each byte of a word, trade places"
    BIAS_DROPPED = "biases have no parameter and are passed over"
    ROWS_DOUBLED = "a layer without a gate holds rows for one"
    COLUMN_UNWRITTEN = "the last column of w2 is never written"
    UNKNOWN_TAKEN = "tensors of unknown names are passed over"
    UNKNOWN_UNNAMED = "an unknown tensor raises an error that does not name it"
    HANDED_BEFORE_INSTALLED = "the converter reads the layer's state before generated scales are on it"
    HANDED_UNQUANTIZED = "the converter is handed the weights as they were before quantization"
    STALE_SCALE = "merged weights are left with gate's scale"
    CODES_TRUNCATED = "codes are rounded toward zero"
    SHARDS_OUT_OF_ORDER = "a directory's shards are read so that one expert is loaded over another"
    FULL_SIZE_TEMPORARIES = "two temporaries of all weights' size are allocated and thrown away"
    ANYTHING_ACCEPTED = "a directory that is incomplete or damaged is loaded without a word"
    NOTHING_NAMED = "what is wrong with a directory is said without naming it"
    FINITE_FOR_NAN = "numbers that are not finite come out as zero"
    NAN_FOR_ZERO = "a scale of zero divides"
    RANKS_ALIKE = "every rank is given the part of the first"
    BIAS_ON_EVERY_RANK = "every rank adds the down projection's bias"
    CUT_GROUP_STRETCHED = "a rank that cuts a group of scales takes its first group for all of its columns"
    LAST_INPUT_SCALE = "of gate's and up's activation scale the one loaded last stays"


_NAME = re.compile(r"(\d+)\.(gate_proj|up_proj|down_proj)\.(.+)")
_WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")
_KINDS = (
    *("weight", "weight_scale", "weight_scale_inv", "input_scale", "bias"),
    *("weight_packed", "weight_zero_point", "weight_shape", "weight_scale_2", "weight_global_scale", "input_global_scale"),
)
_READS = (CheckpointFormat.COMPRESSED_TENSORS, CheckpointFormat.QUARK, CheckpointFormat.MODELOPT, CheckpointFormat.VLLM_FP8)


def reads(case: MoECase) -> bool:
    """Whether the fake can load the case: rows of the weight first, an expert to a tensor, nothing microscaled here."""
    if case.origin is Origin.PREQUANTIZED:
        return case.checkpoint in _READS
    return not case.activation.interleaved and not is_packed(case)


class FakeLoading:
    """Loads any case that ``reads`` names; with ``fault``, wrongly."""

    def __init__(self, backend: Backend, fault: LoadFault | None = None) -> None:
        """``backend`` decides the recipe."""
        self._backend, self._fault, self._runs = backend, fault, FakeSubject(None, backend)
        self._shard: Shard | None = None

    @contextlib.contextmanager
    def as_rank(self, rank: int, ranks: int) -> Iterator[None]:
        """See harness/subject/loading.py."""
        self._shard = Shard(0 if self._fault is LoadFault.RANKS_ALIKE else rank, ranks)
        try:
            yield
        finally:
            self._shard = None

    def watch_loading(
        self,
        case: MoECase,
        checkpoint: Checkpoint,
        *,
        depth: Depth = Depth.LAYER,
        sentinel: int | None = None,
        unfinished: bool = False,
    ) -> Loading:
        """As harness/subject/loading.py says. Raises LoadFailed for a tensor of an unknown name."""
        fault = self._fault
        if self._shard is not None:
            case, checkpoint = slice_of(case, checkpoint, self._shard)
        byte = 0x5A if sentinel is None else sentinel
        before = self._parameters(case, checkpoint, byte)
        consumed: dict[str, tuple[str, ...]] = {}
        for name, tensor in checkpoint.tensors.items():
            consumed[name] = self._load(case, name, tensor, before, depth)
        after, handed = self._process(case, checkpoint, before)
        weights = sum(tensor.nbytes for name, tensor in after.items() if name.endswith(("_weight", "_weight_packed")))
        kept = weights if case.origin is Origin.ONLINE else 0
        peak = kept + 2 * weights if fault is LoadFault.FULL_SIZE_TEMPORARIES else kept
        return Loading(
            quant_method="fake",
            before=before,
            after=after,
            consumed=consumed,
            handed=handed,
            allocated=Allocated(peak=peak, kept=kept, largest=weights) if sentinel is None else None,
        )

    def load_directory(self, case: MoECase, checkpoint: Checkpoint, damage: Callable[[Path], None] | None = None) -> Loaded:
        """What is wrong is told apart by the checkpoint that should have been. Raises LoadFailed, naming it."""
        if self._shard is not None:
            return self._load_rank(case, checkpoint, self._shard)
        should = make_checkpoint(case).tensors
        wrong = [name for name in should if name not in checkpoint.tensors or checkpoint.tensors[name].shape != should[name].shape]
        if (wrong or damage) and self._fault is not LoadFault.ANYTHING_ACCEPTED:
            named = SHARD if damage else ", ".join(wrong)
            raise LoadFailed(f"ValueError: {'something' if self._fault is LoadFault.NOTHING_NAMED else named} is not what it should be")
        tensors = {name: checkpoint.tensors.get(name, tensor).to(tensor.dtype) for name, tensor in should.items()}
        if self._fault is LoadFault.LAST_INPUT_SCALE:
            tensors |= {n: tensors[n.replace("gate_proj", "up_proj")] for n in tensors if n.endswith("gate_proj.input_scale")}
        if self._fault is LoadFault.NAN_FOR_ZERO:
            tensors |= {n: 0 * (1 / t) if n.endswith(_WEIGHT_SCALES) else t for n, t in tensors.items()}
        if wrong or damage:  # accepted: nothing of it is ever run
            return Loaded(handle=None, quant_method="fake", experts_class="fake")
        return self._runs.load(case, Entry.LAYER, replace(checkpoint, tensors=tensors))

    def _load_rank(self, case: MoECase, checkpoint: Checkpoint, rank: Shard) -> Loaded:
        cut, fault = not whole_groups(case, rank.ranks), self._fault
        if cut and fault is LoadFault.NOTHING_NAMED:
            raise LoadFailed("AssertionError: ")
        how = recipe(case, Entry.LAYER, self._backend)
        try:
            stored = shard(stored_experts(case, checkpoint), rank.rank, rank.ranks)
        except ValueError as error:
            if fault is LoadFault.ANYTHING_ACCEPTED:
                return Loaded(handle=None, quant_method="fake", experts_class="fake")
            raise LoadFailed(f"ValueError: a rank's part is no multiple of the group size: {error}") from error
        if cut and case.weight_scale is Layout.BLOCK128:
            raise LoadFailed("ValueError: a rank's part is not divisible by block_n")
        if cut and fault is LoadFault.CUT_GROUP_STRETCHED:
            stored = tuple(replace(each, down=_stretched(each.down)) for each in stored)
        if fault is LoadFault.BIAS_ON_EVERY_RANK:
            whole = stored_experts(case, checkpoint)
            stored = tuple(replace(mine, down=replace(mine.down, bias=all_.down.bias)) for mine, all_ in zip(stored, whole, strict=True))
        return self._runs.load_experts(case, Entry.LAYER, stored, how)

    def run(self, loaded: Loaded, batch: Batch) -> Ran:
        """One forward of the fake subject."""
        ran = self._runs.run(loaded, batch)
        return replace(ran, output=ran.output.nan_to_num(0, 0, 0)) if self._fault is LoadFault.FINITE_FOR_NAN else ran

    def _parameters(self, case: MoECase, checkpoint: Checkpoint, byte: int) -> dict[str, torch.Tensor]:
        parts = 2 if case.activation.gated or self._fault is LoadFault.ROWS_DOUBLED else 1
        made = {}
        for prefix, projection, count in (("w13", "up_proj", parts), ("w2", "down_proj", 1)):
            for kind in _KINDS:
                tensor = checkpoint.tensors.get(f"0.{projection}.{kind}")
                if tensor is None or (kind == "bias" and self._fault is LoadFault.BIAS_DROPPED):
                    continue
                if kind == "input_scale" and case.weight_scale is not Layout.GROUP16:
                    shape: tuple[int, ...] = (case.experts,)
                elif kind == "weight_shape":
                    shape = (case.experts, 2)
                elif tensor.numel() == 1 and case.weight_scale is not Layout.BLOCK128:
                    shape = (case.experts, count) if prefix == "w13" else (case.experts,)
                else:
                    shape = (case.experts, count * tensor.shape[0], *tensor.shape[1:])
                made[f"{prefix}_{kind}"] = torch.zeros(shape, dtype=tensor.dtype)
        for parameter in made.values():
            fill(parameter, byte)
        return made

    def _load(self, case: MoECase, name: str, tensor: torch.Tensor, into: dict[str, torch.Tensor], depth: Depth) -> tuple[str, ...]:
        fault = self._fault
        match = _NAME.fullmatch(name)
        parameter = f"{'w2' if match and match[2] == 'down_proj' else 'w13'}_{match[3] if match else ''}"
        if parameter not in into:
            if fault is LoadFault.UNKNOWN_TAKEN or (fault is LoadFault.BIAS_DROPPED and name.endswith("bias")):
                return ()
            raise LoadFailed("KeyError: no such parameter" if fault is LoadFault.UNKNOWN_UNNAMED else f"KeyError: no parameter for {name}")
        assert match is not None
        expert, last = int(match[1]), case.experts - 1
        scale = "scale" in parameter and "input" not in parameter
        if fault is LoadFault.SCALE_DROPPED and scale and expert == last:
            return (parameter,)
        if fault is LoadFault.EXPERTS_SWAPPED and expert < 2:
            expert = 1 - expert
        if fault is LoadFault.SCALE_OF_NEIGHBOUR and scale and expert == 0:
            _put(case, into[parameter], 1, match[2], tensor)
        if fault is LoadFault.SCALE_OF_NEIGHBOUR and scale and expert == 1:
            return (parameter,)
        if fault is LoadFault.SHARDS_OUT_OF_ORDER and depth is not Depth.LAYER and expert == last:
            expert = 0
        projection = match[2]
        if fault is LoadFault.HALVES_SWAPPED and projection != "down_proj":
            projection = {"gate_proj": "up_proj", "up_proj": "gate_proj"}[projection] if case.activation.gated else projection
        if fault is LoadFault.UP_SCALE_IS_GATES and scale and projection != "down_proj":
            if projection == "gate_proj":
                _put(case, into[parameter], expert, "up_proj", tensor)
            elif case.activation.gated:
                return (parameter,)
        if fault is LoadFault.COLUMN_UNWRITTEN and parameter == "w2_weight":
            into[parameter][expert][:, :-1] = tensor[:, :-1]
            return (parameter,)
        _put(case, into[parameter], expert, projection, tensor)
        return (parameter,)

    def _process(
        self, case: MoECase, checkpoint: Checkpoint, before: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], tuple[Handed, ...]]:
        """Merge or quantize by the fake's own kernel, then hand everything to a converter that changes nothing."""
        fault, how = self._fault, recipe(case, Entry.LAYER, self._backend)
        after = {name: tensor.clone() for name, tensor in before.items()}
        quantizes = case.origin is Origin.ONLINE or (case.weight_scale is Layout.TENSOR and case.activation.gated)
        if quantizes and case.weight_scale is not Layout.NONE and fault is not LoadFault.HANDED_UNQUANTIZED:
            for prefix in ("w13", "w2"):
                loaded = [getattr(expert, prefix) for expert in fake_kernel.load(stored_experts(case, checkpoint), how)]
                codes = [matrix.codes * (0.999 if fault is LoadFault.CODES_TRUNCATED else 1.0) for matrix in loaded]
                codes = [each.trunc() if fault is LoadFault.CODES_TRUNCATED else each for each in codes]
                after[f"{prefix}_weight"] = torch.stack([encode(each.double(), case.weight) for each in codes])
                scales = torch.stack([matrix.scale.float() for matrix in loaded])
                if case.weight_scale is Layout.TENSOR:
                    scales = scales[:, 0, 0]
                    if fault is LoadFault.STALE_SCALE and f"{prefix}_weight_scale" in before:
                        scales = before[f"{prefix}_weight_scale"].reshape(case.experts, -1)[:, 0]
                elif case.weight_scale is Layout.BLOCK128:
                    halves = scales.chunk(2 if prefix == "w13" and case.activation.gated else 1, dim=1)
                    scales = torch.cat([half[:, ::128] for half in halves], dim=1)
                after[f"{prefix}_weight_scale"] = scales
            assert after["w13_weight"].dtype is torch_dtype(case.weight)
        if fault is LoadFault.NIBBLES_SWAPPED:
            after |= {name: _swapped(tensor) for name, tensor in after.items() if name.endswith(("_weight", "_weight_packed"))}
        state = dict(after)
        if fault is LoadFault.HANDED_BEFORE_INSTALLED:
            state = {name: tensor for name, tensor in state.items() if "weight_scale" not in name}
        return after, (Handed(converter="fake_converter", arguments={}, state=state),)


def _swapped(tensor: torch.Tensor) -> torch.Tensor:
    codes = tensor.view(torch.uint8)
    return (codes >> 4 | codes << 4).view(tensor.dtype)


def _stretched(projection: Projection) -> Projection:
    assert projection.scale is not None
    return replace(projection, scale=projection.scale[:, :1].expand(projection.scale.shape))


def _put(case: MoECase, parameter: torch.Tensor, expert: int, projection: str, tensor: torch.Tensor) -> None:
    cell = parameter[expert]
    if cell.dim() == 0 or tensor.dtype is torch.int64:  # int64: the shape of the weight, of either half
        cell.copy_(tensor.reshape(cell.shape))
        return
    size = tensor.shape[0] if tensor.dim() else 1
    start = size if projection == "up_proj" and case.activation.gated else 0
    cell[start : start + size] = tensor.reshape(size, *cell.shape[1:])
