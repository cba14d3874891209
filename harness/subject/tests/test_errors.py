"""A refusal is a reason given by the package's own code; everything else is a failure, quoted."""

from __future__ import annotations

import runpy
from typing import TYPE_CHECKING

import pytest

from harness.subject.errors import is_refusal, verbatim

if TYPE_CHECKING:
    from pathlib import Path

REASON = "raise {}('no kernel for this')\n"
BELOW = "import torch\ntorch.zeros(2, 2) @ torch.zeros(3, 3)\n"


def _raised(folder: Path, text: str) -> Exception:
    (folder / "module.py").write_text(text)
    with pytest.raises(Exception) as raised:  # noqa: PT011  any: which one it is, is the subject
        runpy.run_path(str(folder / "module.py"))
    return raised.value


@pytest.mark.parametrize("kind", ["ValueError", "NotImplementedError", "RuntimeError"])
def test_a_reason_from_the_package(tmp_path: Path, kind: str) -> None:
    assert is_refusal(_raised(tmp_path, REASON.format(kind)), tmp_path)
    assert is_refusal(_raised(tmp_path, "raise ValueError(\n    'two lines'\n)\n"), tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "raise ValueError\n",
        "raise KeyError('weight_scale')\n",
        "class Sub(ValueError): ...\nraise Sub('a validation error')\n",
        "assert False, 'shapes'\n",
        BELOW,
    ],
)
def test_what_is_no_reason(tmp_path: Path, text: str) -> None:
    assert not is_refusal(_raised(tmp_path, text), tmp_path)


def test_a_reason_from_elsewhere(tmp_path: Path) -> None:
    assert not is_refusal(_raised(tmp_path, REASON.format("ValueError")), tmp_path / "package")


def test_type_and_text_are_kept(tmp_path: Path) -> None:
    assert verbatim(_raised(tmp_path, "raise KeyError('weight_scale')\n")) == "KeyError: 'weight_scale'"
    assert verbatim(_raised(tmp_path, BELOW)).startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")


def test_a_kernel_error_names_its_cause() -> None:
    error = type("InterpreterError", (Exception,), {})("outer")
    error.__cause__ = AttributeError("inner")
    assert verbatim(error) == "InterpreterError: outer (from AttributeError: inner)"
