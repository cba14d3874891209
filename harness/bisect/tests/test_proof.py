"""Proof on real sources: a history of the installed vLLM with faults planted and repaired among harmless commits; each is found."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.bisect.tests.repos import Checkout
from harness.bisect.trouble import Exit
from harness.cli import main

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

INT8_CHANNEL = "int8-channel-dyntoken-ct-silu-fp32-e4k2m8h128i64-balanced"
FP8_TENSOR = "e4m3fn-tensor-static-ct-silu-bf16-e4k2m8h128i64-one_each"

ROUTED = "vllm/model_executor/layers/fused_moe/routed_experts.py"
KERNEL = "vllm/model_executor/layers/fused_moe/fused_moe.py"
FACTORY = "vllm/model_executor/layers/fused_moe/layer.py"
FP8_UTILS = "vllm/model_executor/layers/quantization/utils/fp8_utils.py"
HARMLESS = ("vllm/logger.py", "vllm/envs.py", KERNEL, ROUTED, FP8_UTILS)


@dataclass(frozen=True)
class Edit:
    """Replaces text that occurs once in a file, in one or more places."""

    file: str
    changes: tuple[tuple[str, str], ...]

    def into(self, checkout: Checkout, *, back: bool = False) -> dict[str, str | None]:
        text = (checkout.path / self.file).read_text()
        for before, after in self.changes:
            old, new = (after, before) if back else (before, after)
            assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {self.file}"
            text = text.replace(old, new)
        return {self.file: text}


SWAPPED_HALF = Edit(
    ROUTED,
    (
        ("narrow(shard_dim, shard_size, shard_size)", "narrow(shard_dim, 0, shard_size) "),
        ("narrow(shard_dim, 0, shard_size)\n", "narrow(shard_dim, shard_size, shard_size)\n"),
    ),
)
SCALE_INDEX = Edit(
    KERNEL,
    (
        (
            "off_experts * stride_bse + offs_bn[None, :] * stride_bsn\n            )\n            b_scale",
            "off_experts * stride_bsn + offs_bn[None, :] * stride_bsn\n            )\n            b_scale",
        ),
    ),
)
_LOOP = "\n        start = 0\n        for shard_id in range(2):\n            dq_weight = per_tensor_dequantize("
DROPPED_REQUANTIZATION = Edit(FP8_UTILS, ((f"for expert_id in range(num_experts):{_LOOP}", f"for expert_id in ():{_LOOP}"),))
UNFAMILIAR = Edit(
    FACTORY,
    (
        ('    prefix: str = "",\n    custom_routing_function', '    name: str = "",\n    custom_routing_function'),
        ("    layer_name = prefix\n", "    layer_name = name\n"),
    ),
)
BROKEN_IMPORT = Edit("vllm/logger.py", (("import logging\n", "import logging_of_vllm as logging\n"),))


@dataclass
class History:
    """The repository, and its commits by name."""

    checkout: Checkout
    shas: dict[str, str] = field(default_factory=dict)

    def commit(self, name: str, files: dict[str, str | None]) -> None:
        self.shas[name] = self.checkout.commit(name, files)

    def harmless(self) -> None:
        """A commit that changes words: every third only outside the sources."""
        number = len(self.shas)
        file = HARMLESS[number % len(HARMLESS)]
        words = f"# harmless {number}\n"
        files = {"README.md": words} if number % 3 == 0 else {file: (self.checkout.path / file).read_text() + words}
        self.commit(f"harmless {number}", dict(files))

    def revert(self, name: str, what: str) -> None:
        self.checkout.git("revert", "--no-edit", self.shas[what])
        self.shas[name] = self.checkout.git("rev-parse", "HEAD")


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    made = History(Checkout(tmp_path_factory.mktemp("proof") / "vllm"))
    package = Path(spec.origin).parent
    ignored = shutil.ignore_patterns("*.so", "vllm-rs", "_version.py", "third_party", "vllm_flash_attn", "__pycache__")
    shutil.copytree(package, made.checkout.path / "vllm", ignore=ignored)
    made.commit("start", {})
    plan: dict[int, tuple[str, Edit]] = {
        5: ("swap", SWAPPED_HALF),
        11: ("broken", BROKEN_IMPORT),
        15: ("index", SCALE_INDEX),
        24: ("requant", DROPPED_REQUANTIZATION),
    }
    for number in range(1, 32):
        if number in plan:
            name, edit = plan[number]
            made.commit(name, edit.into(made.checkout))
        elif number == 9:
            made.revert("swap reverted", "swap")
        elif number == 13:
            made.commit("imports again", BROKEN_IMPORT.into(made.checkout, back=True))
        elif number == 20:
            made.commit("index repaired", SCALE_INDEX.into(made.checkout, back=True))
        elif number == 27:
            made.revert("requant reverted", "requant")
        elif number == 29:
            made.revert("requant again", "requant reverted")
        else:
            made.harmless()
    assert len(made.shas) == 32
    return made


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEDIFF_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize(
    ("good", "bad", "case", "on", "culprit"),
    [
        pytest.param("harmless 4", "harmless 7", INT8_CHANNEL, "signature", "swap", id="swapped half"),
        pytest.param("harmless 10", "harmless 16", INT8_CHANNEL, "signature", "index", id="scale index, past commits that do not import"),
        pytest.param("harmless 23", "harmless 25", FP8_TENSOR, "signature", "requant", id="dropped requantization"),
        pytest.param("harmless 26", "harmless 28", FP8_TENSOR, "fixed", "requant reverted", id="a revert that repairs"),
        pytest.param("harmless 10", "harmless 12", INT8_CHANNEL, "import", "broken", id="a commit that does not import"),
    ],
)
def test_each_planted_commit_is_found(
    good: str, bad: str, case: str, on: str, culprit: str, history: History, capsys: pytest.CaptureFixture[str]
) -> None:
    names = history.shas
    ends = ["--good", names[good], "--bad", names[bad], "--repo", str(history.checkout.path)]
    assert main(["bisect", *ends, "--regress-on", on, case, "--entry", "layer", "--backend", "interpreter"]) == Exit.GOOD
    page = capsys.readouterr().out
    assert f" {names[culprit]} " in page, page


def test_a_surface_that_is_not_recognised_is_neither_good_nor_bad(history: History, capsys: pytest.CaptureFixture[str]) -> None:
    checkout = history.checkout
    checkout.write(UNFAMILIAR.into(checkout))
    try:
        assert main(["probe", INT8_CHANNEL, "--repo", str(checkout.path), "--backend", "interpreter"]) == Exit.CANNOT_TELL
    finally:
        checkout.git("checkout", "--quiet", "vllm")
    printed = capsys.readouterr().out
    assert printed.startswith("unknown: ")
    assert " is not recognised: FusedMoEFactory takes no prefix; use a vllm release from " in printed


def test_thirty_two_commits_on_one_case(history: History, capsys: pytest.CaptureFixture[str]) -> None:
    """Faults planted twice, others repaired, commits that do not import: a place where the history really turns, in at most 9 probes."""
    names = history.shas
    began = time.monotonic()
    ends = ["--good", names["start"], "--bad", names["harmless 31"], "--repo", str(history.checkout.path)]
    assert main(["bisect", *ends, FP8_TENSOR, "--entry", "layer", "--backend", "interpreter"]) == Exit.GOOD
    printed = capsys.readouterr()
    assert any(f"- first bad: {names[name]} " in printed.out for name in ("requant", "requant again")), printed.out
    assert len(printed.err.splitlines()) <= 9
    print(f"{time.monotonic() - began:.0f} s")  # noqa: T201 - shown with -s
