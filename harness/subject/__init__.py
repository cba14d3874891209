"""The subject: the thing under test, behind one protocol. vLLM is imported in this package and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    import torch

    from cases.batch import Batch
    from cases.case import Entry, MoECase
    from cases.checkpoint import Checkpoint
    from harness.subject.modes import Mode
    from harness.subject.views import View


class SubjectError(Exception):
    """vLLM raised. ``detail`` keeps its type and text verbatim; ``refused`` is True for a reasoned refusal."""

    def __init__(self, detail: str, *, refused: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.refused = refused


class LoadFailed(SubjectError):
    """Raised by ``Subject.load``."""


class RunFailed(SubjectError):
    """Raised by ``Subject.run``."""


class SubjectUnavailable(Exception):
    """The subject cannot be driven here; the sentence says what was looked for and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A loaded layer. ``handle`` belongs to the subject; nobody else looks inside."""

    handle: object
    quant_method: str  # class name, "UnquantizedFusedMoEMethod"
    experts_class: str  # class that will run, "TritonExperts"; "fused_experts" for the legacy function
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)  # as process_weights_after_loading left them


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one forward produced and which code produced it."""

    output: torch.Tensor  # [M, H] on the CPU, hidden dtype
    experts_class: str  # class whose apply really ran
    gemm_dtypes: tuple[str, ...]  # dtype of A entering each GEMM, in order, e.g. ("float8_e4m3fn", "float8_e4m3fn")


class Subject(Protocol):
    """Two verbs. Each takes and returns plain values and leaves no state behind (dtype, device, config, environment)."""

    name: str  # "vllm 0.33.0 (interpreter)", "fake"

    def load(self, case: MoECase, entry: Entry, checkpoint: Checkpoint) -> Loaded:
        """Build the layer and load ``checkpoint``. Raises LoadFailed or SubjectUnavailable."""
        ...

    def run(self, loaded: Loaded, batch: Batch) -> Ran:
        """One forward. Raises RunFailed."""
        ...


@runtime_checkable
class TakesViews(Protocol):
    """A subject whose functional entry can be handed scale tensors in other shapes and strides."""

    def load_viewed(self, case: MoECase, checkpoint: Checkpoint, views: Mapping[str, View]) -> Loaded:
        """As ``load`` through the functional entry; views: by name, ``w1_scale``, ``w2_scale``, ``a1_scale``, ``a2_scale``."""
        ...


@runtime_checkable
class OnDevice(Protocol):
    """A subject on a device that an error may take away from the whole process."""

    def recover(self) -> str | None:
        """After a failure: give back what the pair held and try the device. None when it works, else what it raised."""
        ...


@runtime_checkable
class HasModes(Subject, Protocol):
    """A subject on a GPU whose loaded layer can be executed in other ways than eagerly, and whose fresh memory can be filled."""

    def poison(self, byte: int) -> None:
        """Memory that is handed out next holds ``byte``."""
        ...

    def lagging(self) -> AbstractContextManager[None]:
        """While entered, a stream of its own is current, with fresh memory filled, and lags behind the host."""
        ...

    def prepare(self, loaded: Loaded, batch: Batch, mode: Mode) -> Callable[[Batch], torch.Tensor]:
        """Capture or compile on ``batch``; called with a batch of its shape: output [M, H] on the CPU. Both raise RunFailed."""
        ...

    def scale_in_place(self, loaded: Loaded, factor: float) -> tuple[str, ...]:
        """Multiply every weight scale in place; their names."""
        ...

    def operand_swaps(self, allowed: bool) -> AbstractContextManager[list[bool]]:
        """While entered, whether each FP8 GEMM swaps its operands is appended; not ``allowed``: none that can be asked not to does."""
        ...

    def free_bytes(self) -> int:
        """Device memory this process may still take."""
        ...
