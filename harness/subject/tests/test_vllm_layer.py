"""The real layer and the real functional entry: what ran, what was refused, and numbers near float64."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest
import torch

from cases.batch import make_batch
from cases.case import Entry, MoECase
from cases.checkpoint import make_checkpoint
from harness.subject import LoadFailed, RunFailed

if TYPE_CHECKING:
    from harness.subject import Loaded, Ran
    from harness.subject.vllm_layer import VllmSubject

pytestmark = pytest.mark.vllm
SMALL, BLOCKS = "e4k2m8h128i64-balanced", "e4k2m8h128i128-balanced"


def once(subject: VllmSubject, text: str, entry: Entry = Entry.LAYER) -> tuple[Loaded, Ran]:
    case = MoECase.from_id(text)
    loaded = subject.load(case, entry, make_checkpoint(case))
    return loaded, subject.run(loaded, make_batch(case))


def digest(ran: Ran) -> str:
    return hashlib.sha256(ran.output.view(torch.uint8).numpy().tobytes()).hexdigest()


RUNS = [  # case, quant method, dtype of A entering both GEMMs
    (f"bf16-none-none-plain-silu-bf16-{SMALL}", "UnquantizedFusedMoEMethod", "bfloat16"),
    (f"fp16-none-none-plain-gelu-fp16-{SMALL}-bias", "UnquantizedFusedMoEMethod", "float16"),
    (f"fp32-none-none-plain-relu2_no_mul-fp32-{SMALL}", "UnquantizedFusedMoEMethod", "float32"),
    (f"int8-channel-dyntoken-ct-silu-fp32-{SMALL}", "CompressedTensorsW8A8Int8MoEMethod", "int8"),
    (f"int8-channel-dyntoken-quark-silu_no_mul-bf16-{SMALL}-bias", "QuarkW8A8Int8MoEMethod", "int8"),
    (f"int8-tensor-dyntoken-quark-silu-bf16-{SMALL}", "QuarkW8A8Int8MoEMethod", "bfloat16"),
    (f"e4m3fn-channel-dyntoken-ct-silu-fp16-{SMALL}", "CompressedTensorsW8A8Fp8MoEMethod", "float8_e4m3fn"),
    (f"e4m3fn-tensor-static-quark-gelu_tanh-bf16-{SMALL}", "QuarkW8A8Fp8MoEMethod", "float8_e4m3fn"),
    (f"e4m3fn-tensor-dyntensor-vllmfp8-silu-fp16-{SMALL}-norenorm", "Fp8MoEMethod", "float8_e4m3fn"),
    (f"e4m3fn-block128-dyngroup128-ct-silu-bf16-{BLOCKS}", "CompressedTensorsW8A8Fp8MoEMethod", "float8_e4m3fn"),
    (f"e4m3fn-tensor-dyntensor-online-silu-bf16-{SMALL}", "Fp8PerTensorOnlineMoEMethod", "float8_e4m3fn"),
    (f"e4m3fn-channel-dyntoken-online-relu2_no_mul-bf16-{SMALL}", "Fp8PtpcOnlineMoEMethod", "float8_e4m3fn"),
    ("e4m3fn-block128-dyngroup128-online-silu-bf16-e4k2m8h192i80-balanced", "Fp8PerBlockOnlineMoEMethod", "float8_e4m3fn"),
    (f"int8-channel-none-online-silu-fp16-{SMALL}", "Int8OnlineMoEMethod", "float16"),
]


@pytest.mark.parametrize(("text", "method", "dtype"), RUNS, ids=[text for text, *_ in RUNS])
def test_the_forced_backend_ran(subject: VllmSubject, text: str, method: str, dtype: str) -> None:
    loaded, ran = once(subject, text)
    assert (loaded.quant_method, loaded.experts_class, ran.experts_class) == (method, "TritonExperts", "TritonExperts")
    assert ran.gemm_dtypes == (dtype, dtype)
    case = MoECase.from_id(text)
    assert ran.output.shape == (case.tokens, case.hidden)
    assert torch.isfinite(ran.output).all()
    assert ran.output.abs().max() > 0
    assert loaded.parameters


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        (f"int8-channel-dyntoken-ct-silu-fp32-{SMALL}", "int8"),
        (f"int8-tensor-dyntensor-raw-silu-fp32-{SMALL}", "int8"),
        (f"int8-channel-none-raw-silu-bf16-{SMALL}-bias", "bfloat16"),
        (f"int8-block128-dyngroup128-raw-silu-fp16-{BLOCKS}", "int8"),
        (f"e4m3fn-tensor-dyntoken-raw-silu-bf16-{SMALL}", "float8_e4m3fn"),
        (f"e4m3fn-block128-dyngroup128-vllmfp8-relu2_no_mul-bf16-{BLOCKS}", "float8_e4m3fn"),
        (f"fp32-none-none-plain-silu-fp32-{SMALL}-bias", "float32"),
    ],
)
def test_the_functional_entry_ran(subject: VllmSubject, text: str, dtype: str) -> None:
    loaded, ran = once(subject, text, Entry.FUSED_EXPERTS)
    assert (loaded.experts_class, ran.experts_class) == ("fused_experts", "fused_experts")
    assert ran.gemm_dtypes == (dtype, dtype)
    assert torch.isfinite(ran.output).all()


@pytest.mark.parametrize("entry", list(Entry))
@pytest.mark.parametrize("shape", ["e4k2m8h128i64-balanced", "e5k3m17h192i80-skewed", "e3k1m2h40i24-single-norenorm-onin"])
def test_an_unquantized_layer_is_near_float64(subject: VllmSubject, entry: Entry, shape: str) -> None:
    case = MoECase.from_id(f"fp32-none-none-plain-silu-fp32-{shape}")
    tensors, batch = make_checkpoint(case).tensors, make_batch(case)
    x = batch.hidden_states.double()
    weights, ids = torch.softmax(batch.router_logits.double(), -1).topk(case.top_k)
    weights = weights / weights.sum(-1, keepdim=True) if case.renormalize else weights
    truth = torch.zeros_like(x)
    for row in range(case.tokens):
        for slot in range(case.top_k):
            gate, up, down = (tensors[f"{int(ids[row, slot])}.{name}.weight"].double() for name in ("gate_proj", "up_proj", "down_proj"))
            y = x[row] * (weights[row, slot] if case.router_weight_on_input else 1)
            y = down @ (torch.nn.functional.silu(gate @ y) * (up @ y))
            truth[row] += y * (1 if case.router_weight_on_input else weights[row, slot])
    ran = once(subject, case.id, entry)[1]
    assert (ran.output.double() - truth).norm() < 1e-5 * truth.norm()


def test_the_same_numbers_through_two_formats_are_identical(subject: VllmSubject) -> None:
    for first, second in (("ct", "quark"), ("quark", "ct")):
        one, two = (once(subject, f"int8-channel-dyntoken-{name}-silu-bf16-{SMALL}")[1] for name in (first, second))
        assert torch.equal(one.output, two.output)


def test_running_twice_and_on_two_layers_at_once(subject: VllmSubject) -> None:
    first, second = (MoECase.from_id(f"e4m3fn-channel-dyntoken-ct-silu-bf16-{SMALL}{tail}") for tail in ("", "-s1"))
    layers = [subject.load(case, Entry.LAYER, make_checkpoint(case)) for case in (first, second)]
    outputs = [digest(subject.run(layer, make_batch(case))) for layer, case in zip(layers, (first, second), strict=True)]
    again = [digest(subject.run(layer, make_batch(case))) for layer, case in zip(layers, (first, second), strict=True)]
    assert outputs == again
    assert outputs[0] != outputs[1]


def test_a_batch_is_not_written_to(subject: VllmSubject) -> None:
    case = MoECase.from_id(f"fp32-none-none-plain-relu2_no_mul-fp32-{SMALL}")
    batch = make_batch(case)
    before = batch.hidden_states.clone()
    subject.run(subject.load(case, Entry.LAYER, make_checkpoint(case)), batch)
    assert torch.equal(batch.hidden_states, before)


REFUSED = [
    (f"int8-tensor-static-ct-silu-bf16-{SMALL}", "RuntimeError: Unsupported FusedMoe scheme"),
    (f"int8-tensor-dyntoken-ct-silu-bf16-{SMALL}", "ValueError: For INT8 Fused MoE layers, we require channelwise"),
    (f"e4m3fn-tensor-dyntensor-ct-silu-bf16-{SMALL}", "ValueError: FP8 MoE backend TRITON does not support"),
    (f"e4m3fn-channel-static-quark-silu-bf16-{SMALL}", "ValueError: For FP8 Fused MoE layers, only per-tensor"),
]


@pytest.mark.parametrize(("text", "reason"), REFUSED, ids=[text for text, _ in REFUSED])
def test_a_reasoned_refusal_is_told_apart(subject: VllmSubject, text: str, reason: str) -> None:
    with pytest.raises(LoadFailed) as raised:
        once(subject, text)
    assert raised.value.refused
    assert raised.value.detail.startswith(reason)


def test_an_assertion_is_no_refusal(subject: VllmSubject) -> None:
    with pytest.raises(LoadFailed) as raised:
        once(subject, f"e4m3fn-channel-static-ct-silu-bf16-{SMALL}")
    assert not raised.value.refused
    assert raised.value.detail.startswith("AssertionError")


def test_a_failure_while_loading_is_no_refusal(subject: VllmSubject) -> None:
    case = MoECase.from_id(f"int8-channel-dyntoken-ct-silu-bf16-{SMALL}")
    checkpoint = make_checkpoint(case)
    checkpoint.tensors["1.down_proj.weight"] = checkpoint.tensors["1.down_proj.weight"].repeat(2, 2)
    with pytest.raises(LoadFailed) as raised:
        subject.load(case, Entry.LAYER, checkpoint)
    assert not raised.value.refused


@pytest.mark.parametrize(
    ("text", "entry", "detail"),
    [
        (f"int8-channel-static-quark-silu-bf16-{SMALL}", Entry.LAYER, "AttributeError: 'NoneType' object has no attribute 'is_monolithic'"),
        (f"e4m3fn-block128-dyngroup128-ct-silu-fp32-{BLOCKS}", Entry.LAYER, "RuntimeError: Input must be FP16 or BF16"),
        (
            f"int8-tensor-dyntensor-raw-silu-bf16-{SMALL}",
            Entry.FUSED_EXPERTS,
            "RuntimeError: expected scalar type Float but found BFloat16",
        ),
    ],
)
def test_what_vllm_raises_is_quoted(subject: VllmSubject, text: str, entry: Entry, detail: str) -> None:
    with pytest.raises(RunFailed) as raised:
        once(subject, text, entry)
    assert raised.value.detail == detail
    assert not raised.value.refused


def test_an_operator_without_a_stand_in_is_named(subject: VllmSubject) -> None:
    from harness.subject.errors import is_refusal, verbatim
    from harness.subject.vllm_compat import probe_surface

    with pytest.raises(NotImplementedError) as raised:
        torch.ops._C.rms_norm(torch.zeros(1, 4), torch.zeros(1, 4), torch.zeros(4), 1e-6)
    assert verbatim(raised.value).startswith("compiled operator _C::rms_norm has no CPU implementation in the interpreter lane")
    assert not is_refusal(raised.value, probe_surface().package)
