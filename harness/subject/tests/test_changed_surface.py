"""A vLLM whose surface has really changed: a tree of the installed one in which a name is another name everywhere."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from cases.case import Level
from harness.environment import child_environ
from harness.exits import Exit
from harness.pairs import select

PACKAGE = Path(next(iter(importlib.util.find_spec("vllm").submodule_search_locations)))
CASE = select(Level.SMOKE)[0].case.id


def changed(where: Path, files: Mapping[Path, str]) -> None:
    """``where/vllm``: links to the installed package, except for ``files`` (paths below the package)."""
    where.mkdir(exist_ok=True)
    own = {file.parts[0] for file in files}
    for name in {each.name for each in PACKAGE.iterdir()} - own - {"__pycache__"}:
        (where / name).symlink_to(PACKAGE / name)
    _fill(where, PACKAGE, files)


def _fill(where: Path, real: Path, files: Mapping[Path, str]) -> None:
    for first in {file.parts[0] for file in files}:
        inside = {Path(*file.parts[1:]): text for file, text in files.items() if file.parts[0] == first}
        if Path() in inside:
            (where / first).write_text(inside[Path()])
            continue
        (where / first).mkdir()
        own = {file.parts[0] for file in inside}
        for each in (real / first).iterdir():
            if each.name not in own and each.name != "__pycache__":
                (where / first / each.name).symlink_to(each)
        _fill(where / first, real / first, inside)


def renamed(old: str, new: str) -> dict[Path, str]:
    """Every module that has the name, with the other one."""
    found = {path.relative_to(PACKAGE): path.read_text() for path in PACKAGE.rglob("*.py")}
    return {path: text.replace(old, new) for path, text in found.items() if old in text}


def another_factory() -> dict[Path, str]:
    """The layer factory takes its arguments by other names."""
    path = Path("model_executor/layers/fused_moe/layer.py")
    return {path: (PACKAGE / path).read_text() + "\n\ndef FusedMoEFactory(num_experts, settings): ...\n"}


@pytest.mark.parametrize(
    ("workers", "files", "sentence"),
    [
        (
            "-n1",
            partial(renamed, "int8_w8a16_moe_quant_config", "int8_weight_only_config"),
            "no int8 w8a16 config at vllm.model_executor.layers.fused_moe",
        ),
        ("-n0", another_factory, "FusedMoEFactory takes no top_k, hidden_size"),
    ],
    ids=["a name is gone", "arguments are gone"],
)
def test_a_surface_that_is_not_recognised_is_one_sentence_and_2(
    workers: str, files: Callable[[], dict[Path, str]], sentence: str, tmp_path: Path
) -> None:
    changed(tmp_path / "vllm", files())
    outside = {name: value for name, value in child_environ().items() if not name.startswith("PYTEST_")}
    environ = {**outside, "PYTHONPATH": os.pathsep.join((str(tmp_path), outside.get("PYTHONPATH", "")))}
    command = [sys.executable, "-m", "harness.cli", "run", CASE, "--backend=interpreter", workers, f"--records={tmp_path / 'out'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == Exit.MISUSE, done.stdout + done.stderr
    assert done.stderr.startswith("moediff: the surface of vllm ")
    assert done.stderr.count("\n") == 1
    assert sentence in done.stderr
    assert "Traceback" not in done.stdout
    assert not any(path.read_text() for path in (tmp_path / "out").glob("*/records.jsonl"))
