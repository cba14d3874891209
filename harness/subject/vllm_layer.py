"""The real subject: vLLM's layer factory, weight loader, post-processing and runner; or its legacy functional entry."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from cases.case import Entry, Origin
from harness.subject import Loaded, LoadFailed
from harness.subject.loading import Depth
from references.vocabulary import CheckpointFormat, Format, Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch

    from cases.batch import Batch
    from cases.case import MoECase
    from cases.checkpoint import Checkpoint
    from harness.subject import Ran
    from harness.subject.loading import Loading
    from harness.subject.modes import Mode
    from harness.subject.views import View

ONLINE = {
    (Format.E4M3FN, Layout.TENSOR): "fp8_per_tensor",
    (Format.E4M3FN, Layout.CHANNEL): "fp8_per_channel",
    (Format.E4M3FN, Layout.BLOCK128): "fp8_per_block",
    (Format.INT8, Layout.CHANNEL): "int8_per_channel_weight_only",
    (Format.E4M3FN, Layout.GROUP32): "mxfp8",
    (Format.E2M1, Layout.GROUP32): "mxfp4",
    (Format.E2M1, Layout.GROUP16): "nvfp4_per_token",
}
_WORDS = (CheckpointFormat.GPTQ, CheckpointFormat.AWQ)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Handle of a loaded layer. ``case`` says nothing to ``run``; it is for a debugger."""

    case: MoECase
    module: torch.nn.Module
    config: Any  # VllmConfig
    device: str


class VllmSubject:
    """Drives the vLLM of this process.

    Args:
        backend: value of vLLM's ``KernelConfig.moe_backend`` to force, e.g. ``"triton"``; ``"auto"`` lets vLLM choose.
        device: ``"cpu"`` for the interpreter lane, ``"cuda"`` otherwise.
        interpreter: activate the interpreter lane first (environment, driver stub, platform, operators, Triton's gaps).

    Raises:
        SubjectUnavailable: from the constructor; this vLLM, or this process, cannot be driven.
    """

    def __init__(self, backend: str = "triton", *, device: str = "cpu", interpreter: bool = True) -> None:
        from harness.subject.hygiene import quiet

        quiet()
        if interpreter:
            from harness.subject.interpreter import activate

            activate.activate()
        from harness.subject import vllm_compat
        from harness.subject.device import share_memory

        surface = vllm_compat.probe_surface()
        if device == "cuda":
            share_memory()
            if backend == "humming":
                from harness.subject.humming_intervals import compile_what_runs

                compile_what_runs()
        self.backend = backend
        self.device = device
        self.name = f"vllm {surface.version} ({'interpreter' if interpreter else device})"

    def load(self, case: MoECase, entry: Entry, checkpoint: Checkpoint) -> Loaded:
        """Build the layer and load ``checkpoint``.

        Raises:
            LoadFailed: vLLM raised; refused when it declined with a reason before any tensor was loaded.
        """
        from harness.subject.hygiene import pristine

        with pristine():
            if entry is Entry.BATCHED:
                from harness.subject import vllm_batched

                return vllm_batched.load(case, checkpoint, self.device, self.backend)
            if entry is Entry.FUSED_EXPERTS:
                from harness.subject import vllm_direct

                return vllm_direct.load(case, checkpoint, self.device)
            return self._load_layer(case, checkpoint)

    def load_viewed(self, case: MoECase, checkpoint: Checkpoint, views: Mapping[str, View]) -> Loaded:
        """The functional entry with scale tensors handed over as ``views`` say.

        Raises:
            LoadFailed: vLLM's config builder raised.
        """
        from harness.subject import vllm_direct
        from harness.subject.hygiene import pristine

        with pristine():
            return vllm_direct.load(case, checkpoint, self.device, views)

    def recover(self) -> str | None:
        """After a failure: None when the device works, else what it raised."""
        from harness.subject import device, vllm_compat

        if self.device == "cpu":
            return None
        vllm_compat.drop_workspaces()
        return device.recover()

    def poison(self, byte: int) -> None:
        """Memory of the device that is handed out next holds ``byte``. Raises RuntimeError when it does not."""
        from harness.subject import modes

        modes.poison(byte)

    def lagging(self) -> AbstractContextManager[None]:
        """While entered, a stream of its own is current, with fresh memory filled, and lags behind the host."""
        from harness.subject import modes

        return modes.lagging()

    def prepare(self, loaded: Loaded, batch: Batch, mode: Mode) -> Callable[[Batch], torch.Tensor]:
        """Execute ``loaded`` in another way, prepared on ``batch``; called with a batch of its shape: output [M, H] on the CPU.

        Raises:
            RunFailed: vLLM raised, here or when the result is called.
        """
        if not isinstance(loaded.handle, _Layer):
            from harness.subject import vllm_batched, vllm_direct

            return (vllm_batched if vllm_batched.loaded_here(loaded) else vllm_direct).prepare(loaded, batch, mode)
        from harness.subject import modes

        layer = loaded.handle
        return modes.prepare(layer.config, lambda *each: layer.module(*each), lambda b: (b.hidden_states, b.router_logits), batch, mode)

    def scale_in_place(self, loaded: Loaded, factor: float) -> tuple[str, ...]:
        """Multiply every weight scale of ``loaded`` by ``factor``, a power of two, in place; names of the tensors."""
        from harness.subject import modes

        return modes.scale_in_place(loaded, factor)

    def operand_swaps(self, allowed: bool) -> AbstractContextManager[list[bool]]:
        """While entered, whether each FP8 GEMM swaps its operands is appended; not ``allowed``: Triton's never does."""
        from harness.subject import modes

        return modes.operand_swaps(allowed)

    def free_bytes(self) -> int:
        """Bytes of the device that this process may still take."""
        from harness.subject import modes

        return modes.free_bytes()

    def run(self, loaded: Loaded, batch: Batch) -> Ran:
        """One forward of ``batch``.

        Raises:
            RunFailed: vLLM raised.
        """
        from harness.subject.hygiene import pristine

        with pristine():
            if not isinstance(loaded.handle, _Layer):
                from harness.subject import vllm_batched, vllm_direct

                return (vllm_batched if vllm_batched.loaded_here(loaded) else vllm_direct).run(loaded, batch)
            return self._run_layer(loaded.handle, batch)

    def watch_loading(
        self,
        case: MoECase,
        checkpoint: Checkpoint,
        *,
        depth: Depth = Depth.LAYER,
        sentinel: int | None = None,
        unfinished: bool = False,
    ) -> Loading:
        """Load once through the layer entry, watched; see harness/subject/loading.py.

        Raises:
            LoadFailed: vLLM raised.
        """
        from harness.subject import vllm_loading
        from harness.subject.hygiene import pristine

        where = {"backend": forced(case, self.backend), "device": self.device, "depth": depth}
        with pristine():
            quantization = partial(_quantization, backend=self.backend)
            how = {"sentinel": sentinel, "unfinished": unfinished, "asked": asked(case, self.backend)}
            return vllm_loading.watch(case, checkpoint, quantization, **how, **where)

    def load_directory(self, case: MoECase, checkpoint: Checkpoint, damage: Callable[[Path], None] | None = None) -> Loaded:
        """Read by vLLM's own loader from a directory to which ``damage`` was done.

        Raises:
            LoadFailed: vLLM raised.
        """
        from harness.subject import vllm_loading
        from harness.subject.hygiene import pristine

        where = {"backend": forced(case, self.backend), "device": self.device, "asked": asked(case, self.backend)}
        with pristine():
            module, config = vllm_loading.from_directory(case, checkpoint, damage, **where)
        return self._loaded(case, module, config)

    def as_rank(self, rank: int, ranks: int) -> AbstractContextManager[None]:
        """While entered, layers are built and loaded as that rank's; see harness/subject/loading.py."""
        from harness.subject import vllm_compat

        return vllm_compat.tensor_parallel(self.device, rank, ranks)

    def _load_layer(self, case: MoECase, checkpoint: Checkpoint) -> Loaded:
        from harness.subject import device, vllm_compat
        from harness.subject.vllm_loading import built, loading

        quantization, backend = partial(_quantization, backend=self.backend), forced(case, self.backend)
        with (
            loading() as stage,
            built(case, checkpoint, quantization, backend=backend, device=self.device, stage=stage) as made,
        ):
            vllm_compat.load_weights(made.layer, made.quantization, checkpoint.tensors)
            vllm_compat.finish_loading(made.layer, made.config)
            device.settle(self.device)
        return self._loaded(case, made.layer, made.config)

    def _loaded(self, case: MoECase, module: torch.nn.Module, config: Any) -> Loaded:
        from harness.subject import vllm_compat
        from harness.subject.observe import planned_class

        experts = vllm_compat.experts_of(module)
        return Loaded(
            handle=_Layer(case, module, config, self.device),
            quant_method=type(experts.quant_method).__name__,
            experts_class=planned_class(experts),
            parameters={name: parameter.data for name, parameter in experts.named_parameters()},
        )

    def _run_layer(self, layer: _Layer, batch: Batch) -> Ran:
        from harness.subject import vllm_compat
        from harness.subject.forward import forward

        inputs, watched = (batch.hidden_states, batch.router_logits), vllm_compat.experts_of(layer.module)
        return forward(layer.module, inputs, config=layer.config, device=layer.device, watched=watched)


def forced(case: MoECase, backend: str) -> str:
    """The moe_backend forced where ``backend`` was asked for: NVFP4 has no kernels called triton, but vLLM's emulation of it is Triton."""
    nvfp4 = case.weight is Format.E2M1 and case.weight_scale is Layout.GROUP16
    return "emulation" if backend == "triton" and nvfp4 else backend


def asked(case: MoECase, backend: str) -> str | None:
    """What ``--quantization`` says. Triton reads GPTQ and AWQ files where it says moe_wna16, and nowhere else."""
    if case.origin is Origin.ONLINE:
        return ONLINE.get((case.weight, case.weight_scale))
    return "moe_wna16" if backend == "triton" and case.checkpoint in _WORDS else None


def _quantization(case: MoECase, checkpoint: Checkpoint, *, backend: str) -> Any | None:
    from harness.subject import vllm_compat

    if case.origin is not Origin.ONLINE:
        model_type = "gpt_oss" if case.checkpoint is CheckpointFormat.GPT_OSS else None
        return vllm_compat.checkpoint_quantization(checkpoint.quantization_config, asked(case, backend), model_type)
    name = ONLINE.get((case.weight, case.weight_scale))
    if name is None:
        raise LoadFailed(f"vLLM has no online quantization to {case.weight} {case.weight_scale}", refused=True)
    return vllm_compat.online_quantization(name)
