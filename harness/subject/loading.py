"""What is seen of one loading, as plain values, and the subject that can be watched while it loads."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch

    from cases.batch import Batch
    from cases.case import MoECase
    from cases.checkpoint import Checkpoint
    from harness.subject import Loaded, Ran


class Depth(StrEnum):
    """From where vLLM reads the tensors."""

    LAYER = "layer"  # the layer's load_weights is handed named tensors
    DIRECTORY = "directory"  # config.json and safetensors shards, read by vLLM's loader through get_model; one tensor per expert
    STACKED = "stacked"  # the same, with the experts of a projection stacked in one tensor, gate and up in one


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """What one converter was given, copied before it began.

    arguments: tensors by parameter name of the converter. state: ``layer.state_dict()`` of the layer it was given, by name.
    """

    converter: str
    arguments: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """Bytes allocated while weights were converted and quantized (process_weights_after_loading), inputs not counted.

    peak: most that lived at once. kept: what the layer's own tensors hold of it afterwards. largest: the largest single allocation, 0
    where that is not known.
    """

    peak: int
    kept: int
    largest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """One loading. Tensors are copies on the CPU, by name without the layer's prefix.

    consumed: checkpoint tensor -> the parameters that vLLM says it went into, in order; at layer depth only.
    before: the layer's state as process_weights_after_loading found it. after: its parameters as it left them.
    ended: what vLLM raised while it converted, verbatim; then ``after`` is empty. Empty: nothing.
    """

    quant_method: str
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    consumed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    handed: tuple[Handed, ...] = ()
    allocated: Allocated | None = None
    ended: str = ""


@runtime_checkable
class ReadsDirectories(Protocol):
    """A subject that can be given a checkpoint as a directory, and run what was read."""

    def load_directory(self, case: MoECase, checkpoint: Checkpoint, damage: Callable[[Path], None] | None = None) -> Loaded:
        """Write ``checkpoint`` to a directory, do ``damage`` to it, and have vLLM's own loader read it. Raises LoadFailed."""
        ...

    def run(self, loaded: Loaded, batch: Batch) -> Ran:
        """One forward. Raises RunFailed."""
        ...


@runtime_checkable
class WatchedLoading(Protocol):
    """A subject whose loading can be watched."""

    def watch_loading(
        self,
        case: MoECase,
        checkpoint: Checkpoint,
        *,
        depth: Depth = Depth.LAYER,
        sentinel: int | None = None,
        unfinished: bool = False,
    ) -> Loading:
        """Load ``checkpoint`` once through the layer entry.

        unfinished: what conversion raises at layer depth is not raised but returned, as ``Loading.ended``.
        sentinel: byte that uninitialised memory and every parameter is filled with before loading (a NaN where the dtype has one);
        None: memory is left alone and allocations are counted.

        Raises:
            LoadFailed: vLLM raised.
        """
        ...


@runtime_checkable
class HasRanks(Protocol):
    """A subject that can load one rank's part of a layer, in one process."""

    def as_rank(self, rank: int, ranks: int) -> AbstractContextManager[None]:
        """While entered, layers are built and loaded as tensor parallel rank ``rank`` of ``ranks``; they run outside, without reduction."""
        ...


@runtime_checkable
class Loads(WatchedLoading, ReadsDirectories, HasRanks, Protocol):
    """A subject of which every question about loading can be asked."""
