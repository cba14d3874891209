"""House rules that no linter checks. Each reads the source tree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_LONGEST = 400
_TOLERANCE = re.compile(r"\b[ra]tol\s*=\s*(?!0\b)(?!0\.0\b)[\d.]")
_SKIP_ON_EXCEPTION = re.compile(r"except [^\n]*:\n\s+(?:pytest\.skip|pass$)", re.MULTILINE)


def sources() -> Iterator[Path]:
    for room in ("references", "cases", "harness", "reports"):
        yield from sorted((ROOT / room).rglob("*.py"))


def test_a_file_holds_one_idea() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    assert {path: length for path, length in lengths.items() if length > _LONGEST} == {}


def test_tolerances_are_derived_in_one_place() -> None:
    assert _TOLERANCE.search("close(a, b, {}=1e-3)".format("rtol"))  # put together here, so that this file is no exception
    assert not _TOLERANCE.search("close(a, b, rtol=0, atol=0.0)")
    elsewhere = [path for path in sources() if path != ROOT / "references" / "bounds.py"]
    assert [str(path.relative_to(ROOT)) for path in elsewhere if _TOLERANCE.search(path.read_text(encoding="utf-8"))] == []


def test_no_exception_turns_into_a_skip_or_into_nothing() -> None:
    assert _SKIP_ON_EXCEPTION.search("try:\n    f()\nexcept ValueError:\n    pytest.skip('no')\n")
    assert [str(path.relative_to(ROOT)) for path in sources() if _SKIP_ON_EXCEPTION.search(path.read_text(encoding="utf-8"))] == []


def test_conftest_is_wiring() -> None:
    assert len((ROOT / "conftest.py").read_text(encoding="utf-8").splitlines()) < 120


def test_pins_are_names_and_versions_only() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line)] == []
    assert {"cuda-python==13.0.3", "cuda-bindings==13.0.3"} <= set(lines)  # newer ones break an import of vLLM 0.33's kernels
