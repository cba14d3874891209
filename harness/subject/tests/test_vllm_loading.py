"""Real vLLM, with faults put into its own loader: each is seen by an oracle. And what the watcher sees of an honest loading."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cases.case import Entry, MoECase
from cases.checkpoint import make_checkpoint
from harness.backends import SPECS, Backend
from harness.load_run import ask
from harness.loading import Question
from harness.pairs import Pair
from harness.subject import LoadFailed
from harness.subject.directory import PREFIX, SHARDS, stacked, write_directory
from harness.subject.loading import Depth, Loads
from harness.suite.subjects import VLLM, open_subject
from harness.verdict import Outcome, Verdict

if TYPE_CHECKING:
    from harness.subject.vllm_layer import VllmSubject

vllm = pytest.mark.vllm
SMALL = "e4k2m8h128i64-balanced"
CHANNEL, STATIC = f"e4m3fn-channel-dyntoken-ct-silu-bf16-{SMALL}", f"e4m3fn-tensor-static-quark-silu-bf16-{SMALL}"
ONLINE, SINGLE = f"e4m3fn-channel-dyntoken-online-silu-bf16-{SMALL}", f"e4m3fn-channel-dyntoken-online-relu2_no_mul-bf16-{SMALL}"
WORDS, NVFP4 = f"int4-group32-none-ct-silu-bf16-{SMALL}", f"e2m1-group16-dyngroup16-modelopt-silu-bf16-{SMALL}"
GPT_OSS = f"e2m1-group32-none-gptoss-swigluoai-bf16-{SMALL}-bias"
RANKS = "e4m3fn-channel-dyntoken-ct-silu-bf16-e4k2m8h128i96-balanced"
MANY = "e4m3fn-channel-dyntoken-online-silu-bf16-e16k1m3h256i128-balanced"


def became(subject: VllmSubject, text: str, question: Question = Question.LOADED) -> Verdict:
    return ask(question, Pair(MoECase.from_id(text), Entry.LAYER), Backend.INTERPRETER, subject).verdict


@vllm
def test_the_subject_can_be_asked(subject: VllmSubject) -> None:
    assert isinstance(subject, Loads)


@vllm
@pytest.mark.parametrize("text", [CHANNEL, STATIC, ONLINE, SINGLE, WORDS, NVFP4, f"uint4-group32-none-awq-silu-bf16-{SMALL}", GPT_OSS])
@pytest.mark.parametrize("question", [Question.LOADED, Question.DIRECTORY])
def test_an_honest_loading_holds(subject: VllmSubject, text: str, question: Question) -> None:
    verdict = became(subject, text, question)
    assert verdict.outcome is Outcome.PASS, verdict.detail


@vllm
def test_collections_pass_over_vllm_before_and_after_a_directory_is_read(subject: VllmSubject) -> None:
    """A refused pair is followed by a collection, which took most of its time."""
    try:
        open_subject(VLLM, Backend.INTERPRETER)
        opened = gc.get_freeze_count()
        assert opened > 100_000
        became(subject, CHANNEL, Question.DIRECTORY)
        assert gc.get_freeze_count() > opened - 10_000
    finally:
        gc.unfreeze()


Loader = Callable[..., Any]


@pytest.fixture
def loader(subject: VllmSubject, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Loader], Loader]], None]:
    """Replaces the weight loader of vLLM's layer by one around it."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    def wrap(around: Callable[[Loader], Loader]) -> None:
        around_it = around(RoutedExperts.weight_loader)
        around_it.supports_moe_loading = True  # type: ignore[attr-defined]
        monkeypatch.setattr(RoutedExperts, "weight_loader", around_it)

    return wrap


def swapping(original: Loader) -> Loader:
    def weight_loader(self: Any, param: Any, loaded_weight: Any, weight_name: str, shard_id: str, *rest: Any, **kwargs: Any) -> Any:
        return original(self, param, loaded_weight, weight_name, {"w1": "w3", "w3": "w1"}.get(shard_id, shard_id), *rest, **kwargs)

    return weight_loader


def dropping_a_scale(original: Loader) -> Loader:
    def weight_loader(
        self: Any, param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int, return_success: bool = False
    ) -> Any:
        if expert_id == 2 and "weight_scale" in weight_name:
            return True
        return original(self, param, loaded_weight, weight_name, shard_id, expert_id, return_success=return_success)

    return weight_loader


@vllm
@pytest.mark.parametrize(
    ("fault", "text", "signature"),
    [
        (swapping, CHANNEL, "NOT_DECODED:weight+NOT_DECODED:weight_scale"),
        (swapping, STATIC, "NOT_DECODED:weight+NOT_DECODED:weight_scale"),
        (swapping, ONLINE, "NOT_DECODED:weight"),
        (swapping, WORDS, "HANDED:convert_to_wna16_moe_kernel_format:weight+HANDED:convert_to_wna16_moe_kernel_format:weight_scale"),
        (swapping, NVFP4, "HANDED:convert_to_nvfp4_moe_kernel_format:weight+HANDED:convert_to_nvfp4_moe_kernel_format:weight_scale"),
        (dropping_a_scale, CHANNEL, "SENTINEL_LEFT:w13_weight_scale"),
        (dropping_a_scale, STATIC, "NOT_DECODED:weight_scale"),
    ],
)
def test_a_loader_with_a_fault_is_seen(
    subject: VllmSubject, loader: Callable[..., None], fault: Callable[[Loader], Loader], text: str, signature: str
) -> None:
    loader(fault)
    verdict = became(subject, text)
    assert verdict.outcome is Outcome.NOT_IDENTICAL
    assert signature in verdict.signature


@vllm
def test_a_converter_handed_other_scales_is_seen(subject: VllmSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization.online import fp8

    original = fp8._Fp8OnlineMoEBase._setup_kernel

    def doubled(self: Any, layer: Any, w13: Any, w2: Any, w13_scale: Any, w2_scale: Any, *rest: Any, **kwargs: Any) -> None:
        original(self, layer, w13, w2, w13_scale * 2, w2_scale, *rest, **kwargs)

    monkeypatch.setattr(fp8._Fp8OnlineMoEBase, "_setup_kernel", doubled)
    verdict = became(subject, ONLINE)
    assert verdict.signature == "HANDED:convert_to_fp8_moe_kernel_format:weight_scale+LEFT:layer:weight_scale"


@vllm
def test_rows_for_a_gate_that_is_not_there_are_seen(subject: VllmSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    monkeypatch.setattr(FusedMoEConfig, "w13_num_shards", 2)
    verdict = became(subject, SINGLE)
    assert verdict.outcome is Outcome.NOT_IDENTICAL
    assert "SIZE:weight" in verdict.signature


@vllm
def test_two_full_size_temporaries_are_seen(subject: VllmSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization.online import fp8

    original = fp8._Fp8OnlineMoEBase._setup_kernel

    def wasteful(self: Any, layer: Any, w13: torch.Tensor, *rest: Any, **kwargs: Any) -> None:
        first = w13.clone()
        second = first.clone()
        del first, second
        original(self, layer, w13, *rest, **kwargs)

    assert became(subject, MANY, Question.MEMORY).outcome is Outcome.PASS
    monkeypatch.setattr(fp8._Fp8OnlineMoEBase, "_setup_kernel", wasteful)
    verdict = became(subject, MANY, Question.MEMORY)
    assert (verdict.outcome, verdict.signature) == (Outcome.NOT_IDENTICAL, "PEAK:conversion")


@vllm
@pytest.mark.parametrize("question", [Question.DIRECTORY, Question.STACKED])
def test_a_loader_of_directories_that_swaps_experts_is_seen(
    subject: VllmSubject, monkeypatch: pytest.MonkeyPatch, question: Question
) -> None:
    from vllm.model_executor.model_loader import default_loader

    original = default_loader.safetensors_weights_iterator

    def confused(*args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in original(*args, **kwargs):
            yield name.replace("experts.0.", "experts.1."), tensor.flip(0) if tensor.dim() == 3 else tensor

    monkeypatch.setattr(default_loader, "safetensors_weights_iterator", confused)
    verdict = became(subject, CHANNEL, question)
    assert (verdict.outcome, verdict.signature) == (Outcome.NOT_IDENTICAL, f"DEPTHS_DIFFER:{question}")


@vllm
def test_ranks_that_hold_one_part_are_seen(subject: VllmSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    assert became(subject, RANKS, Question.SHARDED).outcome is Outcome.PASS
    monkeypatch.setattr(FusedMoEConfig, "tp_rank", property(lambda self: 0))
    verdict = became(subject, RANKS, Question.SHARDED)
    assert verdict.signature == "SHARD:w13_weight+SHARD:w13_weight_scale+SHARD:w2_weight+SUM:output"


@vllm
@pytest.mark.parametrize("backend", sorted({spec.moe_backend for spec in SPECS.values()}))
def test_int4_with_int8_activations_is_refused_in_these_words(subject: VllmSubject, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    case = MoECase.from_id("int4-group128-dyntoken-ct-silu-bf16-e4k2m8h256i256-balanced")
    sound = make_checkpoint(case)
    config = copy.deepcopy(sound.quantization_config)
    assert config is not None
    config["config_groups"]["group_0"]["input_activations"]["type"] = "int"  # the file says FP8: W4A8 of CUTLASS and Humming
    monkeypatch.setattr(subject, "backend", backend)
    with pytest.raises(LoadFailed) as raised:
        subject.watch_loading(case, replace(sound, quantization_config=config))
    assert raised.value.refused
    assert raised.value.detail == "NotImplementedError: W4A8 Int8 MoE is only supported on CPU platforms"


@vllm
def test_what_a_directory_lacks_is_vllms_to_say(subject: VllmSubject) -> None:
    case = MoECase.from_id(CHANNEL)
    with pytest.raises(LoadFailed) as raised:
        subject.load_directory(case, make_checkpoint(case), lambda folder: [each.unlink() for each in folder.glob("*.safetensors")])  # type: ignore[func-returns-value]
    assert raised.value.detail.startswith("RuntimeError: Cannot find any model weights")


@vllm
def test_watching_leaves_nothing_behind(subject: VllmSubject) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import compressed_tensors_moe_w8a8_fp8 as module

    case = MoECase.from_id(CHANNEL)
    before = (torch.get_default_dtype(), module.convert_to_fp8_moe_kernel_format)
    subject.watch_loading(case, make_checkpoint(case), sentinel=0x7F)
    subject.watch_loading(case, make_checkpoint(case), depth=Depth.DIRECTORY)
    assert (torch.get_default_dtype(), module.convert_to_fp8_moe_kernel_format) == before
    assert not torch.isnan(torch.empty(1000)).all()


def test_stacked_tensors_hold_gate_rows_first() -> None:
    case = MoECase.from_id(CHANNEL)
    tensors = make_checkpoint(case).tensors
    made = stacked(case, tensors)
    assert sorted(made) == ["down_proj", "down_proj_scale", "gate_up_proj", "gate_up_proj_scale"]
    assert made["gate_up_proj"].shape == (4, 128, 128)
    assert torch.equal(made["gate_up_proj"][2, :64].view(torch.uint8), tensors["2.gate_proj.weight"].view(torch.uint8))
    assert torch.equal(made["gate_up_proj_scale"][3, 64:], tensors["3.up_proj.weight_scale"])


@vllm
def test_a_directory_holds_every_tensor_once(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    case = MoECase.from_id(CHANNEL)
    checkpoint = make_checkpoint(case)
    write_directory(tmp_path, case, checkpoint, {"model_type": "qwen3_moe"}, Depth.DIRECTORY)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == SHARDS
    read = [load_file(shard) for shard in shards]
    names = [name for shard in read for name in shard]
    assert sorted(names) == sorted(f"{PREFIX}.{name}" for name in checkpoint.tensors)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert all(name in read[[shard.name for shard in shards].index(index[name])] for name in names)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"
