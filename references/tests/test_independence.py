"""The references must not know what they judge: importing all of them loads torch, the standard library and themselves."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import references

ROOT = Path(next(iter(references.__path__))).parent
MODULES = sorted(f"references.{m.name}" for m in pkgutil.iter_modules(references.__path__) if m.name != "tests")

PROGRAM = """
import sys
import torch
before = set(sys.modules)
import {modules}
roots = {{name.partition('.')[0] for name in set(sys.modules) - before}}
print(*sorted(roots - sys.stdlib_module_names))
"""


def loaded_by(modules: list[str]) -> list[str]:
    program = PROGRAM.format(modules=", ".join(modules))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.split()


def test_references_load_nothing_but_torch_and_themselves() -> None:
    assert {"references.answer", "references.bounds", "references.moe", "references.vocabulary"} <= set(MODULES)
    assert loaded_by(MODULES) == ["references"]


def test_the_check_sees_a_foreign_import() -> None:
    assert loaded_by([*MODULES, "ml_dtypes"]) == ["ml_dtypes", "references"]


def test_the_vocabulary_loads_without_torch() -> None:
    program = "import sys, references.vocabulary; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0
