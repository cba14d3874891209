from __future__ import annotations

import pytest

from cases.case import Level, MoECase
from cases.checkpoint import make_checkpoint
from harness.cli import main
from harness.commands.show import on_disk
from harness.exits import Exit
from harness.pairs import select

WAYS = {  # the smallest layer of each way to be stored
    (c.checkpoint, c.origin, c.stored, c.weight_scale, c.act_scale, c.activation.interleaved): c.id
    for c in sorted({pair.case for pair in select(Level.SMOKE)}, key=lambda c: -c.experts * c.hidden * c.intermediate)
}


@pytest.mark.parametrize("text", sorted(WAYS.values()))
def test_shapes_are_those_of_the_checkpoint_that_is_made(text: str) -> None:
    case = MoECase.from_id(text)
    made, (told, config) = make_checkpoint(case), on_disk(case)
    mine = {name: tensor for name, tensor in made.tensors.items() if name.startswith("0.") or not name[0].isdigit()}
    assert {name: (list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in mine.items()} == told
    assert made.quantization_config == config


def test_no_layer_is_too_large_to_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "int4-group128-none-ct-silu-bf16-e8k1m2h16384i16384-balanced", "--backend", "marlin"]) == Exit.AS_THE_LEDGER_SAYS
    assert "[16384, 2048]" in capsys.readouterr().out


SIZES = "bf16-e4k2m8h128i128-balanced"
INT8 = "int8-channel-static-quark-silu-fp16-e4k2m8h128i64-balanced"


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["show", *arguments]) == Exit.AS_THE_LEDGER_SAYS
    return capsys.readouterr().out


def test_what_is_refused_has_a_reason_and_no_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(capsys, f"e4m3fn-channel-dyntoken-quark-silu-{SIZES}", "--backend", "cutlass")
    assert "refused by vLLM: only compressed-tensors and online per-channel FP8 allow vLLM's CUTLASS kernels" in told
    assert "vLLM CUTLASS FP8 MoE backend is disabled" in told
    assert "accumulator" not in told
    assert "class that runs" not in told


def test_what_ends_in_an_error_where_a_reason_should_be(capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(capsys, f"int8-channel-dyntoken-ct-silu-{SIZES}-onin".replace("k2", "k1"), "--backend", "humming")
    assert "without a reason: vLLM ends with" in told


def test_on_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    case = f"e4m3fn-channel-dyntoken-ct-silu-{SIZES}"
    before = shown(capsys, case, "--backend", "triton")
    told = shown(capsys, case, "--architecture", "sm80", "--backend", "triton")
    assert "through layer on triton, as sm80" in told
    assert "FP8 tensor cores, sm89" in told
    assert f"moediff run {case} --entry layer --backend triton --architecture sm80" in told
    assert shown(capsys, case, "--backend", "triton") == before
    assert main(["show", case, "--architecture", "sm70"]) == Exit.MISUSE


def test_where_no_reference_is_written_no_recipe_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    case = "e2m1-group16-dyngroup16-ct-silu-bf16-e4k2m8h128i64-balanced"
    told = shown(capsys, case, "--architecture", "sm100", "--backend", "flashinfer-cutedsl")
    assert "no reference is written" in told
    assert "accumulator" not in told


def test_a_pair_as_list_prints_it_is_shown_through_its_entry(capsys: pytest.CaptureFixture[str]) -> None:
    case = INT8
    both = shown(capsys, case, "--backend", "interpreter")
    told = shown(capsys, f"{case}[fused_experts]", "--backend", "interpreter")
    assert told.startswith(f"{case}\n")
    assert (both.count("again: "), told.count("again: ")) == (3, 1)
    assert f"again: moediff run {case} --entry fused_experts --backend interpreter\n" in told


@pytest.mark.parametrize(
    ("text", "backend", "says"),
    [
        (f"{INT8}[back]", "interpreter", "unknown entry 'back'"),
        (f"{INT8}[layer", "interpreter", "is not a case"),
        (f"e2m1-group16-dyngroup16-ct-silu-{SIZES}[fused_experts]", "triton", "entry 'fused_experts' does not take this case; leave ["),
        (f"{INT8}[fused_experts]", "marlin", "backend 'marlin' has no entry 'fused_experts'; leave [fused_experts] out"),
    ],
)
def test_a_pair_that_is_none_is_misuse(text: str, backend: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", text, "--backend", backend]) == Exit.MISUSE
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert says in told.err


@pytest.mark.parametrize(
    ("backend", "architecture", "says"),
    [
        ("aiter", [], "cannot drive the GPUs of aiter yet"),
        ("flashinfer-cutlass", [], "with --architecture NAME it is loaded as for one of sm90"),
        ("flashinfer-cutlass", ["--architecture", "sm90"], "again: moediff run CASE --entry layer --backend flashinfer-cutlass --arch"),
        ("triton", ["--architecture", "sm90"], "loads layers for triton, and runs nothing"),
        ("triton", [], "again: moediff run CASE --entry fused_experts --backend triton\n"),
    ],
)
def test_a_command_is_shown_where_there_is_one(
    backend: str, architecture: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case = f"e4m3fn-tensor-static-ct-silu-{SIZES}"
    told = shown(capsys, case, "--backend", backend, *architecture).replace(case, "CASE")
    assert says in told
    assert ("again: " in told) is (backend == "triton" or bool(architecture))
