"""Checkpoint depth: a directory on disk that vLLM's own loader reads into a model of one MoE layer, registered with vLLM's registry."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cases.gating import swiglu
from harness.subject import vllm_compat
from harness.subject.directory import PREFIX, write_directory
from harness.subject.dtypes import TORCH
from harness.subject.watch_loading import Watched, fill_parameters, watch_conversion
from references.vocabulary import CheckpointFormat, Swiglu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cases.case import MoECase
    from cases.checkpoint import Checkpoint
    from harness.subject.loading import Depth

ARCHITECTURE = "MoediffMoEForCausalLM"
_built: list[Callable[[torch.nn.Module], None]] = []  # told of the experts of a model under construction


class _Block(torch.nn.Module):
    """model.layers.0 or its mlp: a name in the tree."""


@functools.cache
def _register() -> None:
    """The architecture, once per process."""
    loader = vllm_compat.probe_surface()["AutoWeightsLoader"]

    class MoediffMoEForCausalLM(torch.nn.Module):
        """One MoE layer at ``model.layers.0.mlp.experts`` and nothing besides."""

        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()
            self.quant_config = vllm_config.quant_config  # whose mapper of names the loader applies
            self.config = sizes = vllm_config.model_config.hf_config
            self.parallel_config = vllm_config.parallel_config
            self.model = _Block()
            self.model.layers = torch.nn.ModuleList([_Block()])
            self.model.layers[0].mlp = _Block()
            layer = vllm_compat.make_layer(
                dtype=vllm_config.model_config.dtype,
                experts=sizes.num_experts,
                top_k=sizes.num_experts_per_tok,
                hidden=sizes.hidden_size,
                intermediate=sizes.moe_intermediate_size,
                activation=sizes.moediff_activation,
                renormalize=sizes.norm_topk_prob,
                bias=sizes.moediff_bias,
                router_weight_on_input=sizes.moediff_router_weight_on_input,
                swiglu=None if sizes.moediff_swiglu is None else Swiglu(**sizes.moediff_swiglu),
                quantization=vllm_config.quant_config,
                prefix=PREFIX,
            )
            self.model.layers[0].mlp.experts = layer
            for told in _built:
                told(vllm_compat.experts_of(layer))

        def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor: ...

        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor: ...

        def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor: ...

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            if self.config.model_type == "gpt_oss":
                return _as_gpt_oss(self, weights)
            return loader(self).load_weights(weights)

    vllm_compat.probe_surface()["ModelRegistry"].register_model(ARCHITECTURE, MoediffMoEForCausalLM)


def _as_gpt_oss(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """vLLM's own loader of gpt-oss's stacked tensors, over ``model``."""
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM, GptOssModel

    model._try_load_streamed_expert = GptOssModel._try_load_streamed_expert
    named = GptOssForCausalLM.hf_to_vllm_mapper.apply(weights)
    return GptOssModel._load_weights_mxfp4(model, model.config.num_local_experts, 0, named, [])


def model_config(case: MoECase) -> dict[str, Any]:
    """config.json without its quantization_config: a Qwen3-MoE (or gpt-oss) configuration with what that has no word for under our own
    names."""
    gpt_oss = case.checkpoint is CheckpointFormat.GPT_OSS
    return vllm_compat.hf_config(TORCH[case.dtype], case.experts, case.top_k, case.hidden, case.intermediate) | {
        "architectures": [ARCHITECTURE],
        **({"model_type": "gpt_oss", "num_local_experts": case.experts} if gpt_oss else {}),
        "norm_topk_prob": case.renormalize,
        "moediff_activation": case.activation.value,
        "moediff_bias": case.bias,
        "moediff_router_weight_on_input": case.router_weight_on_input,
        "moediff_swiglu": None if (parameters := swiglu(case)) is None else asdict(parameters),
    }


@dataclass(frozen=True, slots=True)
class Read:
    """What the loader made: the layer at model.layers.0.mlp.experts, vLLM's config, and what was seen of its loading."""

    layer: torch.nn.Module
    config: Any
    seen: Watched


def read(
    case: MoECase,
    checkpoint: Checkpoint,
    *,
    backend: str,
    device: str,
    depth: Depth,
    sentinel: int | None,
    asked: str | None,
    stage: Any,
    damage: Callable[[Path], None] | None = None,
) -> Read:
    """One loading from a directory. asked: what ``--quantization`` says, or None. Whatever vLLM raises propagates."""
    _register()
    with tempfile.TemporaryDirectory() as folder:
        write_directory(Path(folder), case, checkpoint, model_config(case), depth)
        if damage is not None:
            damage(Path(folder))
        return _read(folder, TORCH[case.dtype], backend, device, sentinel, asked, stage)


def _read(folder: str, dtype: torch.dtype, backend: str, device: str, sentinel: int | None, asked: str | None, stage: Any) -> Read:
    surface = vllm_compat.probe_surface()
    config = surface["VllmConfig"](
        kernel_config=surface["KernelConfig"](moe_backend=backend),
        load_config=surface["LoadConfig"](use_tqdm_on_load=False),
        model_config=surface["ModelConfig"](model=folder, skip_tokenizer_init=True, dtype=dtype, max_model_len=512, quantization=asked),
    )
    seen: list[Watched] = []
    with contextlib.ExitStack() as stack:

        def built(experts: torch.nn.Module) -> None:
            stage.choosing = False
            fill_parameters(experts, sentinel)
            seen.append(stack.enter_context(watch_conversion(experts, count=sentinel is None)))

        with vllm_compat.current_config(config):
            vllm_compat.prepare_process(device)
            _built.append(built)
            try:
                model = surface["get_model"](vllm_config=config)
            finally:
                _built.remove(built)
        return Read(model.model.layers[0].mlp.experts, config, seen[0])
