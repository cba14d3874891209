"""Building vLLM's layer and loading it, watched."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cases.gating import swiglu
from harness.subject import LoadFailed, SubjectError, SubjectUnavailable, vllm_compat
from harness.subject.directory import PREFIX
from harness.subject.dtypes import TORCH
from harness.subject.errors import is_refusal, verbatim
from harness.subject.loading import Depth
from harness.subject.watch_loading import fill_parameters, poisoned, watch_conversion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import torch

    from cases.case import MoECase
    from cases.checkpoint import Checkpoint
    from harness.subject.loading import Loading

_NEVER_WRITTEN = 0xFF  # so that what a checkpoint leaves out is never right by chance


class _Stage:
    """Where a loading is: what vLLM raises while it chooses how to run the layer may be a refusal."""

    choosing = True


@dataclass(frozen=True, slots=True)
class Built:
    """A layer before any tensor is loaded, vLLM's config, and the QuantizationConfig it was built with."""

    layer: torch.nn.Module
    config: Any
    quantization: Any | None


@contextlib.contextmanager
def loading() -> Iterator[_Stage]:
    """What vLLM raises becomes LoadFailed, verbatim."""
    stage = _Stage()
    try:
        yield stage
    except (SubjectError, SubjectUnavailable):
        raise
    except Exception as error:
        refused = stage.choosing and is_refusal(error, vllm_compat.probe_surface().package)
        raise LoadFailed(verbatim(error), refused=refused) from error


@contextlib.contextmanager
def built(
    case: MoECase,
    checkpoint: Checkpoint,
    quantization: Callable[[MoECase, Checkpoint], Any],
    *,
    backend: str,
    device: str,
    stage: _Stage,
) -> Iterator[Built]:
    """The case's layer; while entered vLLM's config, the device and the default dtype are those of the model loader. What vLLM raises
    propagates."""
    import torch

    sizes = {"experts": case.experts, "top_k": case.top_k, "hidden": case.hidden, "intermediate": case.intermediate}
    config = vllm_compat.vllm_config(backend, TORCH[case.dtype], **sizes)
    with vllm_compat.current_config(config), torch.device(device):
        vllm_compat.prepare_process(device)
        torch.set_default_dtype(TORCH[case.dtype])
        config_of_weights = quantization(case, checkpoint)
        layer = vllm_compat.make_layer(
            **sizes,
            dtype=TORCH[case.dtype],
            activation=case.activation.value,
            renormalize=case.renormalize,
            bias=case.bias,
            router_weight_on_input=case.router_weight_on_input,
            swiglu=swiglu(case),
            quantization=config_of_weights,
            prefix=PREFIX,
        )
        stage.choosing = False
        yield Built(layer, config, config_of_weights)


def watch(
    case: MoECase,
    checkpoint: Checkpoint,
    quantization: Callable[[MoECase, Checkpoint], Any],
    *,
    backend: str,
    device: str,
    depth: Depth,
    sentinel: int | None,
    asked: str | None,
    unfinished: bool,
) -> Loading:
    """One loading, watched; see harness/subject/loading.py. ``quantization`` makes vLLM's quantization config at layer
    depth; ``asked`` is what ``--quantization`` says at the others.

    Raises:
        LoadFailed: vLLM raised.
    """
    if depth is not Depth.LAYER:
        from harness.subject import checkpoint_depth

        with poisoned(sentinel), loading() as stage:
            where = {"backend": backend, "device": device, "depth": depth, "asked": asked}
            made = checkpoint_depth.read(case, checkpoint, sentinel=sentinel, stage=stage, **where)
            return made.seen.loading(vllm_compat.experts_of(made.layer))
    with (
        poisoned(sentinel),
        loading() as stage,
        built(case, checkpoint, quantization, backend=backend, device=device, stage=stage) as made,
    ):
        experts = vllm_compat.experts_of(made.layer)
        fill_parameters(experts, sentinel)
        with watch_conversion(experts, count=sentinel is None) as seen:
            consumed: dict[str, tuple[str, ...]] = {}
            ended = ""
            try:
                if "gate_up_proj_blocks" in checkpoint.tensors:
                    vllm_compat.load_weights(made.layer, made.quantization, checkpoint.tensors)
                    consumed |= {name: (vllm_compat.GPT_OSS[name],) for name in checkpoint.tensors}
                else:
                    _consume(made.layer, vllm_compat.as_models_hand_them(made.quantization, checkpoint.tensors), consumed)
                vllm_compat.finish_loading(made.layer, made.config)
            except Exception as error:
                if not unfinished or not seen.before:
                    raise
                ended = verbatim(error)
        return seen.loading(experts, consumed, ended)


def from_directory(
    case: MoECase, checkpoint: Checkpoint, damage: Callable[[Path], None] | None, *, backend: str, device: str, asked: str | None
) -> tuple[torch.nn.Module, Any]:
    """The layer that vLLM's own loader reads, and its config. Raises LoadFailed."""
    from harness.subject import checkpoint_depth

    where = {"backend": backend, "device": device, "depth": Depth.DIRECTORY, "asked": asked}
    with poisoned(_NEVER_WRITTEN), loading() as stage:
        made = checkpoint_depth.read(case, checkpoint, sentinel=_NEVER_WRITTEN, stage=stage, damage=damage, **where)
    return made.layer, made.config


def _consume(layer: torch.nn.Module, tensors: Mapping[str, torch.Tensor], consumed: dict[str, tuple[str, ...]]) -> None:
    """Load, and say which parameters each tensor went into: those named between its being taken and the next one's."""
    current = ""
    into: list[str] = []

    def handed() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for name, tensor in tensors.items():
            note()
            current = name
            yield name, tensor

    def note() -> None:
        if current:
            consumed[current] = tuple(into)
        into.clear()

    for parameter in layer.load_weights(handed()):
        into.append(parameter)
    note()
