"""Outputs of two lanes laid side by side; the fake stands for both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cases.batch import make_batch
from cases.case import Entry, Level, MoECase
from cases.checkpoint import make_checkpoint
from harness import agreement
from harness.agreement import Part, asked, compare, main, read
from harness.backends import Backend
from harness.expected import expected
from harness.recipes import recipe
from harness.suite.subjects import open_subject
from references.formats import round_to

CASE = MoECase.from_id("e4m3fn-tensor-static-quark-silu-bf16-e4k2m8h128i64-balanced")
NAME = f"{CASE.id}[layer]"


@pytest.fixture(scope="module")
def output() -> torch.Tensor:
    subject = open_subject("fake", Backend.INTERPRETER)
    return subject.run(subject.load(CASE, Entry.LAYER, make_checkpoint(CASE)), make_batch(CASE)).output


def _compared(ours: torch.Tensor | str, theirs: torch.Tensor | str) -> agreement.Agreement:
    (found,) = compare(Backend.INTERPRETER, {NAME: ours}, Backend.TRITON, {NAME: theirs, "another": "was not run here"})
    return found


def test_the_same_bits_agree(output: torch.Tensor) -> None:
    found = _compared(output, output.clone())
    assert (found.differing, found.elements, found.holds) == (0, 8 * 128, True)


def test_another_honest_output_differs_and_agrees(output: torch.Tensor) -> None:
    answer = expected(CASE, recipe(CASE, Entry.LAYER, Backend.TRITON), make_checkpoint(CASE), make_batch(CASE))
    found = _compared(output, round_to(answer.high, CASE.dtype).to(output.dtype))
    assert found.differing > 0
    assert (found.apart, found.holds) == (0, True)


def test_an_output_outside_the_interval_does_not_agree(output: torch.Tensor) -> None:
    other = output.clone()
    other[3, 5] += 1.0
    found = _compared(output, other)
    assert (found.differing, found.apart, found.holds) == (1, 1, False)
    assert found.otherwise == "interpreter: PASS; triton: MISMATCH"


def test_raising_on_one_lane_does_not_agree(output: torch.Tensor) -> None:
    assert not _compared(output, "ValueError: no").holds
    assert not _compared("ValueError: no", output).holds
    assert _compared("ValueError: no", "AssertionError: ").holds


def test_parts_are_the_level() -> None:
    pairs = asked(Backend.TRITON, Level.SMOKE)
    parts = [Part.parse(f"{number}/7").of(pairs) for number in range(1, 8)]
    assert [pair for part in parts for pair in part] == pairs
    with pytest.raises(ValueError, match="8/7 is no part"):
        Part.parse("8/7")


def test_files_are_put_together_by_backend(tmp_path: Path, output: torch.Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    other = output.clone()
    other[3, 5] += 1.0
    written = {"interpreter": {NAME: output}, "triton": {NAME: other, "only here": output}}
    for backend, outputs in written.items():
        torch.save({"backend": backend, "outputs": outputs}, tmp_path / backend)
    torch.save({"backend": "triton", "outputs": {"a part": "raised"}}, tmp_path / "part")
    files = [tmp_path / name for name in ("interpreter", "triton", "part")]
    assert set(read(files)[Backend.TRITON]) == {NAME, "only here", "a part"}
    assert main(["compare", *map(str, files)]) == 1
    assert "1 pairs: 0 identical, 1 with differences, 1 that do not agree" in capsys.readouterr().out
    assert main(["compare", str(files[0])]) == 2
    assert main(["copy"]) == 2
