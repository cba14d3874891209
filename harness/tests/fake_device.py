"""A subject that has a device's ways without a device: an honest fake, and one fault of each kind that the device checks look for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch

from cases.batch import Batch
from cases.case import Entry, MoECase
from cases.checkpoint import Checkpoint
from harness.backends import Backend
from harness.subject import Loaded, Ran
from harness.subject.fake import FakeSubject
from harness.subject.modes import Mode


class Planted(StrEnum):
    READS_FRESH_MEMORY = "a row past the last is read and added with weight 0"
    LOADS_INTO_FRESH_MEMORY = "padding of a scale reaches the output"
    RUNS_ON_ANOTHER_STREAM = "a kernel is launched on the default stream, whatever the current one"
    LOADS_ON_ANOTHER_STREAM = "a scale is converted on the default stream, whatever the current one"
    HOST_SCALAR = "a graph holds the scale as a number, not as memory"
    FIRST_BATCH = "a graph holds the batch it was captured on"
    COMPILED_CONSTANT = "a compiled function took a scale for a constant"
    UNSEEN = "the kernel has its own copy of the scales"
    SWAPPED_ROWS = "swapped operands give other numbers"
    UNSTEADY = "every seventh run differs in a bit"
    SHORT_OFFSETS = "offsets are 32 bits wide"


class FakeDevice:
    """``run`` multiplies what the honest fake gives by the layer's one scale, which is memory."""

    def __init__(self, planted: Planted | None = None, backend: Backend = Backend.TRITON, free: int = 2**40, swaps: bool = True) -> None:
        self.name, self.planted, self.free, self.swaps = "fake device", planted, free, swaps
        self._honest, self._byte, self._runs, self._seen = FakeSubject(None, backend), 0, 0, list[bool]()
        self._allowed, self._loaded_with, self._lags, self._loaded_late = True, 0, False, False

    def load(self, case: MoECase, entry: Entry, checkpoint: Checkpoint) -> Loaded:
        self._loaded_with, self._loaded_late = self._byte, self._lags
        return replace(self._honest.load(case, entry, checkpoint), parameters={"w13_weight_scale": torch.ones(1)})

    def run(self, loaded: Loaded, batch: Batch) -> Ran:
        ran = self._honest.run(loaded, batch)
        output = ran.output * loaded.parameters["w13_weight_scale"].to(ran.output.dtype)
        self._runs += 1
        swaps = self.swaps and batch.hidden_states.shape[0] <= 64 and self._allowed
        self._seen.append(swaps)
        wrong = {
            Planted.READS_FRESH_MEMORY: self._byte == 0xFF,
            Planted.LOADS_INTO_FRESH_MEMORY: self._loaded_with == 0xFF,
            Planted.RUNS_ON_ANOTHER_STREAM: self._lags,
            Planted.LOADS_ON_ANOTHER_STREAM: self._loaded_late,
            Planted.SWAPPED_ROWS: swaps,
            Planted.UNSTEADY: self._runs % 7 == 0,
        }
        if self.planted is not None and wrong.get(self.planted):
            output[-1, -1] += 1
        return replace(ran, output=output)

    def poison(self, byte: int) -> None:
        self._byte = byte

    @contextlib.contextmanager
    def lagging(self) -> Iterator[None]:
        self._lags = True
        yield
        self._lags = False

    def prepare(self, loaded: Loaded, batch: Batch, mode: Mode) -> Callable[[Batch], torch.Tensor]:
        scale = loaded.parameters["w13_weight_scale"]
        held = scale.clone()
        constant = (Planted.HOST_SCALAR, Mode.GRAPH), (Planted.COMPILED_CONSTANT, Mode.COMPILED)

        def call(given: Batch) -> torch.Tensor:
            used = replace(loaded, parameters={"w13_weight_scale": held}) if (self.planted, mode) in constant else loaded
            own = replace(loaded, parameters={"w13_weight_scale": torch.ones(1)}) if self.planted is Planted.UNSEEN else used
            first = self.planted is Planted.FIRST_BATCH and mode is Mode.GRAPH
            return self.run(own, batch if first else given).output

        return call

    def scale_in_place(self, loaded: Loaded, factor: float) -> tuple[str, ...]:
        loaded.parameters["w13_weight_scale"].mul_(factor)
        return ("w13_weight_scale",)

    @contextlib.contextmanager
    def operand_swaps(self, allowed: bool) -> Iterator[list[bool]]:
        self._allowed, self._seen = allowed, []
        yield self._seen
        self._allowed = True

    def free_bytes(self) -> int:
        return self.free

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)
