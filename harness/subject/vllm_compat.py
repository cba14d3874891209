"""Everything that differs between vLLM versions, found by looking: which names exist and which arguments they take.

No version numbers are compared. A name that is not found where any known version keeps it is reported by
``probe_surface()`` in one sentence.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from harness.subject import SubjectUnavailable
from references.vocabulary import Swiglu

_MOE = "vllm.model_executor.layers.fused_moe"
_QUANT = "vllm.model_executor.layers.quantization"

# what: where it is kept, newest place first
PLACES: dict[str, tuple[str, ...]] = {
    "layer factory": (f"{_MOE}.layer:FusedMoEFactory", f"{_MOE}.layer:FusedMoE"),
    "fused_experts": (f"{_MOE}.fused_moe:fused_experts", f"{_MOE}:fused_experts"),
    "activation enum": (f"{_MOE}.activation:MoEActivation",),
    "int8 w8a8 config": (f"{_MOE}.config:int8_w8a8_moe_quant_config",),
    "int8 w8a16 config": (f"{_MOE}.config:int8_w8a16_moe_quant_config",),
    "fp8 w8a8 config": (f"{_MOE}.config:fp8_w8a8_moe_quant_config",),
    "unquantized config": (f"{_MOE}.config:FUSED_MOE_UNQUANTIZED_CONFIG",),
    "biased config": (f"{_MOE}.config:biased_moe_quant_config",),
    "quantization registry": (f"{_QUANT}:get_quantization_config",),
    "quantization methods": (f"{_QUANT}:QUANTIZATION_METHODS",),
    "VllmConfig": ("vllm.config:VllmConfig",),
    "ModelConfig": ("vllm.config:ModelConfig",),
    "KernelConfig": ("vllm.config:KernelConfig", "vllm.config.kernel:KernelConfig"),
    "set_current_vllm_config": ("vllm.config:set_current_vllm_config",),
    "set_forward_context": ("vllm.forward_context:set_forward_context",),
    "init_distributed_environment": ("vllm.distributed:init_distributed_environment",),
    "initialize_model_parallel": ("vllm.distributed:initialize_model_parallel",),
    "ModelRegistry": ("vllm.model_executor.models:ModelRegistry",),
    "LoadConfig": ("vllm.config:LoadConfig", "vllm.config.load:LoadConfig"),
    "get_model": ("vllm.model_executor.model_loader:get_model",),
    "AutoWeightsLoader": ("vllm.model_executor.models.utils:AutoWeightsLoader",),
}

# may be absent: the version then does without
OPTIONAL: dict[str, tuple[str, ...]] = {
    "tensor parallel group": ("vllm.distributed:get_tp_group",),
    "init_workspace_manager": ("vllm.v1.worker.workspace:init_workspace_manager",),
    "reset_workspace_manager": ("vllm.v1.worker.workspace:reset_workspace_manager",),
    "online config": (f"{_QUANT}.online.base:OnlineQuantizationConfig",),
    "online arguments": ("vllm.config.quantization:resolve_quantization_config",),
    "modular kernel": (f"{_MOE}.modular_kernel:FusedMoEKernel", f"{_MOE}.modular_kernel:FusedMoEModularKernel"),
    "batched rows": (f"{_MOE}.prepare_finalize.batched:BatchedPrepareAndFinalize",),
    "BatchedTritonExperts": (f"{_MOE}.experts.fused_batched_moe:BatchedTritonExperts",),
    "BatchedDeepGemmExperts": (f"{_MOE}.experts.batched_deep_gemm_moe:BatchedDeepGemmExperts",),
    "DeepGEMM weights": (f"{_QUANT}.utils.fp8_utils:prepare_fp8_moe_layer_for_deepgemm",),
    "moe config": (f"{_MOE}.config:FusedMoEConfig",),
    "parallel config": (f"{_MOE}.config:FusedMoEParallelConfig",),
    "routing methods": (f"{_MOE}.config:RoutingMethodType",),
    "finalize online loading": ("vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_processing",),
}

# methods that may take a file whose quant_method has another name (config/model.py, _verify_quantization)
_WORDS = ("auto_gptq", "gptq_marlin", "auto_awq", "awq_marlin", "moe_wna16")
_CLAIMANTS = (*_WORDS, "modelopt", "modelopt_fp4", "modelopt_mxfp8", "gpt_oss_mxfp4")

_BUILT_IN = ("swigluoai", "swiglustep")
_UNUSUAL = {"renormalize": False, "has_bias": True, "apply_router_weight_on_input": True}  # no layer is so unless told
LAYER_ARGUMENTS = ("num_experts", "top_k", "hidden_size", "intermediate_size", "quant_config", "prefix", "activation")
ARCHITECTURE = "MoediffForCausalLM"


def _find(places: tuple[str, ...]) -> Any | None:
    for place in places:
        module, _, name = place.partition(":")
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
                continue
            raise SubjectUnavailable(f"vllm is installed but cannot be imported: {type(error).__name__}: {error}") from error
        if found is not None:
            return found
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """What this vLLM offers, by the names of PLACES and OPTIONAL."""

    version: str
    package: Path  # directory of the vllm package
    found: dict[str, Any]

    def __getitem__(self, what: str) -> Any:
        return self.found[what]

    def __contains__(self, what: str) -> bool:
        return what in self.found


@functools.cache
def probe_surface() -> Surface:
    """Look for every name that the subject needs.

    Raises:
        SubjectUnavailable: vllm is not installed, or one sentence with what was looked for and where.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SubjectUnavailable("vllm is not installed in this environment: install vllm, or run `tox run -e interpreter`")
    package = Path(next(iter(spec.submodule_search_locations)))
    version = getattr(importlib.import_module("vllm"), "__version__", None) or importlib.metadata.version("vllm")
    found: dict[str, Any] = {}
    for table in (PLACES, OPTIONAL):
        for what, places in table.items():
            value = _find(places)
            if value is not None:
                found[what] = value
            elif table is PLACES:
                raise SubjectUnavailable(
                    f"the surface of vllm {version} is not recognised: no {what} at {' or '.join(places)}; "
                    "use a vllm release from 0.27 to 0.33 or a current main"
                )
    missing = [name for name in LAYER_ARGUMENTS if name not in parameters(found["layer factory"])]
    if missing:
        raise SubjectUnavailable(
            f"the surface of vllm {version} is not recognised: {found['layer factory'].__name__} takes no {', '.join(missing)}; "
            "use a vllm release from 0.27 to 0.33 or a current main"
        )
    return Surface(version=version, package=package, found=found)


@functools.cache
def parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Names of the parameters a function or a class's constructor takes."""
    return frozenset(inspect.signature(function).parameters)


def call(function: Callable[..., Any], required: dict[str, Any], optional: dict[str, Any]) -> Any:
    """Call with ``required``, and with what ``function`` takes of ``optional``."""
    names = parameters(function)
    return function(**required, **{name: value for name, value in optional.items() if name in names})


@functools.cache
def _architecture() -> str:
    """A registered model class, so that ModelConfig need not inspect one of vLLM's in a subprocess (20 s, and a cache file)."""

    class MoediffForCausalLM(torch.nn.Module):
        def __init__(self, *, vllm_config: object, prefix: str = "") -> None:
            super().__init__()

        def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor: ...

        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor: ...

        def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor: ...

    probe_surface()["ModelRegistry"].register_model(ARCHITECTURE, MoediffForCausalLM)
    return ARCHITECTURE


def hf_config(dtype: torch.dtype, experts: int, top_k: int, hidden: int, intermediate: int) -> dict[str, Any]:
    """config.json of a model with one MoE layer of these sizes."""
    return {
        "architectures": [_architecture()],
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "moe_intermediate_size": intermediate,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_hidden_layers": 1,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "dtype": str(dtype).removeprefix("torch."),
    }


@functools.lru_cache(maxsize=256)
def _model_config(dtype: torch.dtype, experts: int, top_k: int, hidden: int, intermediate: int) -> Any:
    config = hf_config(dtype, experts, top_k, hidden, intermediate)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        return probe_surface()["ModelConfig"](model=folder, skip_tokenizer_init=True, dtype=dtype, max_model_len=512)


def vllm_config(moe_backend: str, dtype: torch.dtype, *, experts: int, top_k: int, hidden: int, intermediate: int) -> Any:
    """A fresh VllmConfig that forces ``moe_backend``; fresh, because layers register themselves in it by name."""
    surface = probe_surface()
    model = _model_config(dtype, experts, top_k, hidden, intermediate)
    return surface["VllmConfig"](kernel_config=surface["KernelConfig"](moe_backend=moe_backend), model_config=model)


@functools.cache
def prepare_process(device: str) -> None:
    """Distributed environment of one process and workspace, once per process; its rendezvous file is removed again."""
    surface = probe_surface()
    with tempfile.TemporaryDirectory() as folder:
        surface["init_distributed_environment"](1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        surface["initialize_model_parallel"](1, 1)
    if device == "cpu" and "tensor parallel group" in surface:  # some loaders move tensors to where the group is said to be
        surface["tensor parallel group"]().device = torch.device(device)
    if "init_workspace_manager" in surface:
        surface["init_workspace_manager"](torch.device(device))


@contextmanager
def tensor_parallel(device: str, rank: int, ranks: int) -> Iterator[None]:
    """The tensor parallel group says that this process is ``rank`` of ``ranks``. It stays a group of one: nothing may communicate."""
    surface = probe_surface()
    with current_config(vllm_config("auto", torch.bfloat16, experts=2, top_k=1, hidden=128, intermediate=128)):
        prepare_process(device)
    group = surface["tensor parallel group"]()
    before = group.world_size, group.rank_in_group
    group.world_size, group.rank_in_group = ranks, rank
    try:
        yield
    finally:
        group.world_size, group.rank_in_group = before


def drop_workspaces(device: str = "cuda") -> None:
    """Give back the scratch memory that layers share; the next forward allocates its own."""
    surface = probe_surface()
    if "reset_workspace_manager" in surface and "init_workspace_manager" in surface:
        surface["reset_workspace_manager"]()
        surface["init_workspace_manager"](torch.device(device))


@contextmanager
def current_config(config: Any) -> Iterator[None]:
    """``config`` as vLLM's current one."""
    with probe_surface()["set_current_vllm_config"](config), torch.no_grad():
        yield


@contextmanager
def forward_context(config: Any, tokens: int) -> Iterator[None]:
    """What a model runner sets around a forward of ``tokens`` rows."""
    with current_config(config), probe_surface()["set_forward_context"](None, config, num_tokens=tokens):
        yield


def checkpoint_quantization(config: dict[str, Any] | None, asked: str | None = None, model_type: str | None = None) -> Any | None:
    """vLLM's QuantizationConfig for the ``quantization_config`` of a checkpoint, or None where there is none.

    asked: what ``--quantization`` says; model_type: the model's in config.json. vLLM asks each method whether the file is for it.
    """
    if config is None:
        return None
    registry = probe_surface()["quantization registry"]
    model = SimpleNamespace(model_type=model_type)
    for name in probe_surface()["quantization methods"]:
        if name not in _CLAIMANTS:
            continue
        method = registry(name)
        taken = call(method.override_quantization_method, {"hf_quant_cfg": config, "user_quant": asked}, {"hf_config": model})
        if taken is not None:
            return registry(taken).from_config(config)
    return registry(config["quant_method"]).from_config(config)


def as_models_hand_them(quantization: Any | None, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors that reach a layer: a method may name some that vLLM's loaders drop (GPTQ's g_idx)."""
    mapper = getattr(quantization, "get_checkpoint_weight_mapper", None)
    return tensors if mapper is None else dict(mapper().apply(tensors.items()))


GPT_OSS = {
    "gate_up_proj_blocks": "w13_weight",
    "gate_up_proj_scales": "w13_weight_scale",
    "gate_up_proj_bias": "w13_bias",
    "down_proj_blocks": "w2_weight",
    "down_proj_scales": "w2_weight_scale",
    "down_proj_bias": "w2_bias",
}


def load_weights(layer: torch.nn.Module, quantization: Any | None, tensors: dict[str, torch.Tensor]) -> None:
    """The checkpoint into the layer. gpt-oss's tensors hold all experts and go through each parameter's own loader, as models/gpt_oss.py
    does it; everything else through the layer's load_weights."""
    if "gate_up_proj_blocks" not in tensors:
        for _ in layer.load_weights(as_models_hand_them(quantization, tensors).items()):
            pass
        return
    experts = experts_of(layer)
    for name, tensor in tensors.items():
        parameter = getattr(experts, GPT_OSS[name])
        flat = tensor.flatten(2) if name.endswith("_blocks") else tensor
        parameter.weight_loader(parameter, flat, weight_name=GPT_OSS[name], shard_id=None, expert_id=None)


def online_quantization(name: str) -> Any:
    """vLLM's QuantizationConfig for ``--quantization name``.

    Raises:
        SubjectUnavailable: this vLLM has no online quantization of that kind.
    """
    surface = probe_surface()
    if "online config" not in surface or "online arguments" not in surface:
        raise SubjectUnavailable(f"vllm {surface.version} has no online quantization config; leave out cases quantized online")
    arguments = surface["online arguments"]  # names that checkpoints have too are resolved where something else is asked for as well
    return surface["online config"](arguments(name, None) or arguments(name, {}))


def make_layer(
    *,
    dtype: torch.dtype,
    experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    activation: str,
    renormalize: bool,
    bias: bool,
    router_weight_on_input: bool,
    quantization: Any | None,
    prefix: str,
    swiglu: Swiglu | None = None,
) -> torch.nn.Module:
    """The runner (or layer) that a model would build, under the current config.

    Raises:
        SubjectUnavailable: this vLLM's layer cannot be told what makes this one another than the plainest.
    """
    factory = probe_surface()["layer factory"]
    gated = not activation.endswith("_no_mul")
    required = {
        "num_experts": experts,
        "top_k": top_k,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "quant_config": quantization,
        "prefix": prefix,
        "activation": activation,
    }
    optional = {
        "params_dtype": dtype,
        "renormalize": renormalize,
        "has_bias": bias,
        "apply_router_weight_on_input": router_weight_on_input,
        "reduce_results": False,
        # a layer without a gate has its only projection in w1's place
        "ckpt_names": ("gate_proj", "down_proj", "up_proj") if gated else ("up_proj", "down_proj", None),
        **(said := activation_parameters(activation, swiglu)),
    }
    needed = [name for name, value in optional.items() if name in said or value is _UNUSUAL.get(name, ...)]
    if lacking := [name for name in needed if name not in parameters(factory)]:
        raise SubjectUnavailable(f"{factory.__name__} of vllm {probe_surface().version} takes no {', '.join(lacking)}; leave out this case")
    return call(factory, required, optional)


def activation_parameters(activation: str, swiglu: Swiglu | None) -> dict[str, float]:
    """What a model says of its activation, by the names of the layer factory; nothing of what is built into vLLM's operators."""
    if swiglu is None or activation in _BUILT_IN:
        return {}
    if activation == "situ":
        return {"activation_situ_beta": swiglu.situ or 1.0, **({"activation_situ_linear_beta": swiglu.linear} if swiglu.linear else {})}
    said = {"swiglu_limit": swiglu.limit}
    if activation != "silu":
        said |= {"swiglu_alpha": swiglu.alpha, "swiglu_beta": swiglu.beta}
    return {name: value for name, value in said.items() if value is not None}


def swap_choices() -> list[tuple[Any, str]]:
    """(module, name) of the functions that choose to swap the operands of an FP8 GEMM, or are told to, where this vLLM has them."""
    places = ((f"{_MOE}.fused_moe", "enable_swap_ab"), ("vllm._custom_ops", "get_cutlass_moe_mm_problem_sizes_from_expert_offsets"))
    found = [(importlib.import_module(module), name) for module, name in places]
    return [(module, name) for module, name in found if hasattr(module, name)]


def experts_of(layer: torch.nn.Module) -> torch.nn.Module:
    """The module that owns the expert weights: the layer itself where there is no runner around it."""
    return getattr(layer, "routed_experts", layer)


def finish_loading(layer: torch.nn.Module, config: Any) -> None:
    """What the model loader does after the last tensor: finish deferred (online) loading, then post-process."""
    surface = probe_surface()
    experts = experts_of(layer)
    if getattr(experts.quant_method, "uses_meta_device", False) and "finalize online loading" in surface:
        surface["finalize online loading"](layer, config.model_config)
    experts.quant_method.process_weights_after_loading(experts)
