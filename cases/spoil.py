"""Making a checkpoint wrong, in one way, of one expert. What is wrong is said in cases/bad_checkpoints.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from cases.axes import Origin
from cases.bad_checkpoints import FILES, Bad
from cases.packed import is_packed
from references.vocabulary import CheckpointFormat, Layout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cases.case import MoECase
    from cases.checkpoint import Checkpoint

SHARD = "model-00002-of-00003.safetensors"  # harness/subject/directory.py writes three


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoiled:
    """checkpoint: what is read. means: a sound checkpoint of the same layer, where there is one. names: what an error must name, any of
    them. files: the damage done to the directory.

    expert, channels: the tokens of that expert, and the output channels [H] bool, that a value that is not finite enters; None: no such.
    """

    checkpoint: Checkpoint
    means: Checkpoint
    names: tuple[str, ...]
    expert: int
    files: Callable[[Path], None] | None = None
    channels: torch.Tensor | None = None


def spoil(bad: Bad, case: MoECase, checkpoint: Checkpoint) -> Spoiled:
    """``checkpoint`` made wrong; it is left as it was.

    Raises:
        ValueError: it cannot be wrong in that way.
    """
    expert = case.experts - 1  # never without tokens, never all zero (cases/roles.py)
    if bad in FILES:
        return Spoiled(checkpoint=checkpoint, means=checkpoint, names=(SHARD,), expert=expert, files=_DAMAGE[bad])
    tensors, means = dict(checkpoint.tensors), dict(checkpoint.tensors)
    names, channels = _Spoiling(case, expert, tensors, means).change(bad)
    return Spoiled(
        checkpoint=replace(checkpoint, tensors=tensors),
        means=replace(checkpoint, tensors=means),
        names=names,
        expert=expert,
        channels=channels,
    )


_NOT_ZEROED = ("input_scale", "weight_shape", "g_idx", "global_scale", "weight_scale_2")  # of a layer, not of weights
Changed = tuple[tuple[str, ...], "torch.Tensor | None"]


@dataclass(frozen=True, slots=True)
class _Spoiling:
    case: MoECase
    expert: int
    tensors: dict[str, torch.Tensor]
    means: dict[str, torch.Tensor]

    def change(self, bad: Bad) -> Changed:
        """Names of what was changed, and the channels."""
        tensors, expert = self.tensors, self.expert
        gate, down = self._weight("gate_proj"), self._weight("down_proj")
        rows = 1 if self._k_first() else 0
        match bad:
            case Bad.MISSING_SCALE:
                return self._without(self._scale("up_proj"))
            case Bad.MISSING_INPUT_SCALE:
                return self._without(self._named("down_proj", "input_scale", "input_global_scale"))
            case Bad.MISSING_EXPERT:
                return self._without(*self._of(f"{expert}."))
            case Bad.GATE_WITHOUT_UP:
                return self._without(*self._of(f"{expert}.up_proj."))
            case Bad.EXTRA_TENSOR:
                tensors["calibration.weight"] = torch.ones(self.case.hidden, self.case.hidden, dtype=torch.bfloat16)
                return ("calibration.weight",), None
            case Bad.EXTRA_EXPERT:
                more = {f"{self.case.experts}.{name[2:]}": tensors[name].clone() for name in self._of("0.")}
                tensors |= more
                return tuple(more), None
            case Bad.SHORT_WEIGHT:
                tensors[gate] = _half(tensors[gate], rows)
                return (gate,), None
            case Bad.LONG_WEIGHT:
                tensors[gate] = torch.cat([tensors[gate], tensors[gate]], rows)
                return (gate,), None
            case Bad.NARROW_WEIGHT:
                tensors[gate] = _half(tensors[gate], 1 - rows)
                return (gate,), None
            case Bad.SHORT_SCALE:
                name = self._scale("down_proj")
                tensors[name] = _half(tensors[name], rows)
                return (name,), None
            case Bad.WEIGHT_DTYPE:
                tensors[gate] = tensors[gate].float().bfloat16()
                return (gate,), None
            case Bad.NAN_WEIGHT:
                bits = tensors[down].float()
                bits[0, 0] = torch.nan
                tensors[down] = bits.to(tensors[down].dtype)
                return (down,), torch.arange(self.case.hidden) < self._height(online=True)
            case Bad.NAN_SCALE | Bad.INF_SCALE | Bad.ZERO_SCALE | Bad.NEGATIVE_SCALE:
                return self._first_scale(bad, down)
            case Bad.ZERO_EXPERT:
                return self._zero_expert()
            case Bad.UNEQUAL_INPUT_SCALES:
                return self._unequal()
            case Bad.UNEQUAL_GLOBAL_SCALES:
                return self._unequal_globals()
            case _:
                raise ValueError(f"{bad} is damage to files")

    def _of(self, prefix: str) -> list[str]:
        return [name for name in self.tensors if name.startswith(prefix)]

    def _scale(self, projection: str) -> str:
        return self._named(projection, "weight_scale_inv", "weight_scale", "scales")

    def _weight(self, projection: str) -> str:
        return self._named(projection, "weight", "weight_packed", "qweight")

    def _named(self, projection: str, *kinds: str) -> str:
        names = [f"{self.expert}.{projection}.{kind}" for kind in kinds]
        return next((name for name in names if name in self.tensors), names[0])

    def _k_first(self) -> bool:
        return self.case.checkpoint in (CheckpointFormat.GPTQ, CheckpointFormat.AWQ)

    def _without(self, *names: str) -> Changed:
        for name in names:
            del self.tensors[name]
        return names, None

    def _first_scale(self, bad: Bad, down: str) -> Changed:
        """Codes of the scale's region in ``means``: none for a zero, the opposite for a negative scale."""
        name = self._scale("down_proj")
        changed = self.tensors[name].float()  # a copy, or of fp32 the tensor itself
        first = float(changed.reshape(-1)[0])
        values = {Bad.NAN_SCALE: torch.nan, Bad.INF_SCALE: torch.inf, Bad.ZERO_SCALE: 0.0, Bad.NEGATIVE_SCALE: -first}
        changed = changed.flatten().index_fill(0, torch.tensor(0), values[bad]).reshape(changed.shape)
        self.tensors[name] = changed.to(self.tensors[name].dtype)
        height = self._height()
        if bad in (Bad.NAN_SCALE, Bad.INF_SCALE):
            return (name,), torch.arange(self.case.hidden) < height
        if is_packed(self.case):  # scales multiply what is unpacked, whatever their sign
            self.means[name] = self.tensors[name]
            return (name,), None
        codes = self.tensors[down].float()
        width = 128 if self.case.weight_scale is Layout.BLOCK128 else codes.shape[1]
        if bad is Bad.NEGATIVE_SCALE and self.tensors[down].dtype is torch.int8:
            codes = codes.clamp_min(-127)  # -128 has no opposite
            self.tensors[down] = codes.to(torch.int8)
        region = codes[:height, :width]
        codes[:height, :width] = torch.zeros_like(region) if bad is Bad.ZERO_SCALE else -region
        self.means[down] = codes.to(self.tensors[down].dtype)
        return (name,), None

    def _height(self, *, online: bool = False) -> int:
        """Output channels under the first scale. online: those that one weight reaches, through the scale that is made of it or itself."""
        if online and self.case.origin is not Origin.ONLINE:
            return 1
        return {Layout.TENSOR: self.case.hidden, Layout.BLOCK128: 128}.get(self.case.weight_scale, 1)

    def _zero_expert(self) -> Changed:
        mine = [name for name in self._of(f"{self.expert}.") if not name.endswith(_NOT_ZEROED)]
        for name in mine:
            self.tensors[name] = torch.zeros_like(self.tensors[name].float()).to(self.tensors[name].dtype)
            if is_packed(self.case) or not name.endswith(("weight_scale", "weight_scale_inv")):
                self.means[name] = self.tensors[name]
        return tuple(mine), None

    def _unequal(self) -> Changed:
        changed = []
        for expert in range(self.case.experts):
            gate, up = f"{expert}.gate_proj.input_scale", f"{expert}.up_proj.input_scale"
            self.tensors[gate], self.tensors[up] = self.tensors[up], self.tensors[up] * 0.5
            changed += [gate, up]
        self.means.update({name: self.tensors[name] for name in changed})
        return tuple(changed), None

    def _unequal_globals(self) -> Changed:
        """compressed-tensors' divide, ModelOpt's multiply."""
        divides = f"{self.expert}.up_proj.weight_global_scale" in self.tensors
        kind, factor = ("weight_global_scale", 2.0) if divides else ("weight_scale_2", 0.5)
        changed = tuple(f"{expert}.up_proj.{kind}" for expert in range(self.case.experts))
        for name in changed:
            self.means[name] = self.tensors[name] = self.tensors[name] * factor
        return changed, None


def _half(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.narrow(dim, 0, tensor.shape[dim] // 2).clone()


def _empty(folder: Path) -> None:
    (folder / SHARD).write_bytes(b"")


def _truncate(folder: Path) -> None:
    whole = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(whole[: len(whole) // 2])


def _no_tensors(folder: Path) -> None:
    (folder / SHARD).write_bytes((2).to_bytes(8, "little") + b"{}")


_DAMAGE: dict[Bad, Callable[[Path], None]] = {Bad.EMPTY_FILE: _empty, Bad.TRUNCATED_FILE: _truncate, Bad.EMPTY_SHARD: _no_tensors}
