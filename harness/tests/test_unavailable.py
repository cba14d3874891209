"""Lanes that a Hopper GPU, or what is installed beside it, cannot run: UNAVAILABLE, with what is missing."""

from __future__ import annotations

import pytest

from harness import preflight
from harness.backends import Backend
from harness.cli import main
from harness.exits import Exit, Unavailable

SAYS = {
    Backend.FLASHINFER_CUTLASS: "needs the Python module flashinfer",
    Backend.FLASHINFER_TRTLLM: "runs on sm100",
    Backend.FLASHINFER_CUTEDSL: "runs on sm100",
    Backend.AITER: "runs on gfx942, gfx950, and the GPU here is sm90",
}
RUN = (
    Backend.TRITON,
    Backend.BATCHED_TRITON,
    Backend.CUTLASS,
    Backend.MARLIN,
    Backend.HUMMING,
    Backend.HUMMING_A8,
    Backend.DEEP_GEMM,
    Backend.TRITON_UNFUSED,
)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: object())  # vLLM is installed
    monkeypatch.setattr(preflight, "visible_gpus", lambda: ("0",))
    monkeypatch.setattr(preflight, "compute_capability", lambda: 90)
    monkeypatch.setattr(
        preflight, "importable", lambda name: name in ("humming", "vllm.third_party.deep_gemm", "vllm.third_party.triton_kernels")
    )


@pytest.mark.parametrize("backend", SAYS)
def test_what_is_missing_is_said(backend: Backend) -> None:
    reason = preflight.why_not(backend)
    assert isinstance(reason, Unavailable)
    assert SAYS[backend] in str(reason)


@pytest.mark.parametrize("backend", RUN)
def test_the_others_run(backend: Backend) -> None:
    assert preflight.why_not(backend) is None


def test_flashinfer_without_its_kernels_and_without_a_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "importable", lambda name: name == "flashinfer")
    for name in ("CUDA_HOME", "CUDA_PATH", "VLLM_HAS_FLASHINFER_CUBIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pathlib.Path.exists", lambda path: False)
    monkeypatch.setattr("shutil.which", lambda name: "/bin/ninja" if name == "ninja" else None)
    reason = preflight.why_not(Backend.FLASHINFER_CUTLASS)
    assert isinstance(reason, Unavailable)
    assert "flashinfer_cubin, or nvcc and ninja" in str(reason)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert preflight.why_not(Backend.FLASHINFER_CUTLASS) is None


def test_a_lane_of_other_gpus_does_not_ask_for_one_of_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "visible_gpus", lambda: ())
    assert "drives no other" in str(preflight.why_not(Backend.AITER))
    assert "an NVIDIA GPU (sm80, sm89, sm90, sm100, sm120) and none is visible" in str(preflight.why_not(Backend.MARLIN))


@pytest.mark.parametrize("named", [[], ["e4m3fn-tensor-static-ct-silu-bf16-e4k2m8h128i128-balanced"]])
def test_a_level_and_a_case_without_a_reference_end_alike(
    named: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "visible_gpus", lambda: ())
    assert main(["run", *named, "--backend", "aiter"]) == Exit.UNAVAILABLE
    assert "drives no other" in capsys.readouterr().err
    assert (
        main(["run", "e4m3fn-tensor-static-ct-silu-bf16-e4k2m8h128i128-balanced", "--backend", "aiter", "--subject", "fake"]) == Exit.MISUSE
    )
    assert "no reference is written yet" in capsys.readouterr().err
