"""Outputs of two lanes laid side by side; the fake stands for both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cases.batch import make_batch
from cases.case import Entry, Level, MoECase
from cases.checkpoint import make_checkpoint
from harness import agreement, preflight
from harness.agreement import Part, asked, compare, main, read
from harness.backends import Backend
from harness.exits import Exit, Misuse
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


@pytest.mark.parametrize("text", ["8/7", "0/7", "7", "one/7", "1/", "-1/7", "1/2/3"])
def test_what_is_no_part_is_said_to_be_none(text: str) -> None:
    with pytest.raises(Misuse, match="is no part of a level"):
        Part.parse(text)


def test_nan_on_one_lane_differs_and_the_same_nan_does_not(output: torch.Tensor) -> None:
    """Both lanes off, so that no verdict tells them apart."""
    ours, theirs = output.clone(), output.clone()
    ours[0, :2] = theirs[0, 1:3] = torch.nan
    assert _compared(ours, theirs).differing == 2
    assert _compared(ours, ours.clone()).differing == 0


def test_outputs_of_other_shapes_do_not_agree(output: torch.Tensor) -> None:
    assert _compared(output[:1], output[:2]).otherwise == "interpreter: [1, 128]; triton: [2, 128]"


def test_a_file_that_is_written_holds_what_it_held(tmp_path: Path, output: torch.Tensor) -> None:
    file = tmp_path / "held"
    agreement._save(file, Backend.TRITON, {NAME: output})
    assert list(agreement._held(file, Backend.TRITON)) == [NAME]
    assert list(agreement._held(tmp_path / "new", Backend.TRITON)) == []
    assert {path.name for path in tmp_path.iterdir()} == {"held", "new"}


@pytest.fixture
def files(tmp_path: Path, output: torch.Tensor) -> Path:
    """Files of two backends, and some that are none."""
    for name, held in {
        "interpreter": {"backend": "interpreter", "outputs": {NAME: output}},
        "triton": {"backend": "triton", "outputs": {NAME: output}},
        "other": {"backend": "triton", "outputs": {"int8-channel": output}},
        "nobody": {"backend": "nobody", "outputs": {}},
        "list": [1],
    }.items():
        torch.save(held, tmp_path / name)
    torch.save({"backend": "interpreter", "outputs": {"not a case[layer]": output}}, tmp_path / "wrong")
    torch.save({"backend": "triton", "outputs": {"not a case[layer]": output}}, tmp_path / "wrong too")
    (tmp_path / "text").write_text("text")
    (tmp_path / "empty").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ([], "the following arguments are required: write|compare"),
        (["copy"], "invalid choice: 'copy'"),
        (["write"], "required: BACKEND, FILE"),
        (["write", "nope", "x"], "unknown backend 'nope'"),
        (["write", "interpreter", "x", "daily"], "unknown level 'daily'"),
        (["write", "interpreter", "x", "smoke", "3/2"], "'3/2' is no part of a level"),
        (["write", "interpreter", "triton"], "triton holds outputs of triton; name another file for those of interpreter"),
        (["write", "interpreter", "text"], "text is no file of `agreement write`"),
        (["write", "interpreter", "nowhere/x"], "x cannot be written (No such file or directory)"),
        (["compare"], "required: FILE"),
        (["compare", "interpreter"], "these are files of interpreter; compare takes files of two backends"),
        (["compare", "interpreter", "nofile"], "nofile cannot be read (No such file or directory)"),
        (["compare", "interpreter", "."], "cannot be read (Is a directory)"),
        (["compare", "interpreter", "text"], "text is no file of `agreement write`"),
        (["compare", "interpreter", "empty"], "empty is no file of `agreement write`"),
        (["compare", "interpreter", "list"], "list is no file of `agreement write`"),
        (["compare", "interpreter", "nobody"], "unknown backend 'nobody'"),
        (["compare", "interpreter", "other"], "no pair was run on both interpreter and triton"),
        (["compare", "wrong", "wrong too"], "'not a case' is not a case"),
    ],
)
def test_misuse_is_one_sentence_and_2(
    files: Path, typed: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)
    monkeypatch.setattr(agreement, "check", lambda *_: None)  # whatever is installed here
    assert main(typed) == Exit.MISUSE
    said = capsys.readouterr().err
    assert said.startswith("agreement: ")
    assert sentence in said
    assert said.count("\n") == 1


def test_a_machine_that_cannot_run_the_backend_is_125(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(preflight, "has_vllm", lambda: True)
    assert main(["write", "marlin", str(tmp_path / "x")]) == Exit.UNAVAILABLE
    assert capsys.readouterr().err.startswith("agreement: backend 'marlin' needs an NVIDIA GPU")
    assert not list(tmp_path.iterdir())


def test_help_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "125" in capsys.readouterr().out


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
