"""Comparing stand-ins with compiled operators, rehearsed without a GPU: the stand-ins, or faults of theirs, in the operators' place."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.exits import Exit
from harness.subject import SubjectUnavailable, fidelity, fidelity_calls
from harness.subject.fidelity import Fidelity, _all_of, _allowed, _inside, compared, measured
from harness.subject.fidelity_calls import Call
from harness.subject.interpreter import compiled_ops

CALLS = [call for group in fidelity_calls.GROUPS.values() for call in group()]


def _copy(arguments: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(each.clone() if isinstance(each, torch.Tensor) else each for each in arguments)


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., object]], None]:
    """No device, and the operator given in the compiled one's place."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(fidelity, "_device", lambda each, _: each.clone() if isinstance(each, torch.Tensor) else each)
    return lambda operator: monkeypatch.setattr(fidelity, "_compiled", lambda _: operator)


def test_every_stand_in_is_compared() -> None:
    assert {call.operator for call in CALLS} == set(compiled_ops.IMPLEMENTATIONS)
    assert len({(call.operator, call.data) for call in CALLS}) == len(CALLS)


def test_every_stand_in_is_allowed() -> None:
    for call in CALLS:
        if (allowed := _allowed(call.operator, call.arguments)) is None:
            continue
        arguments = _copy(call.arguments)
        compiled_ops.IMPLEMENTATIONS[call.operator](*arguments)
        for interval, position in zip(allowed, call.outputs, strict=True):
            finite = torch.isfinite(interval.low) & torch.isfinite(interval.high)
            output = arguments[position]
            assert isinstance(output, torch.Tensor)
            assert bool((_inside(interval, output) | ~finite).all()), call.data


@pytest.mark.parametrize("operator", sorted(compiled_ops.IMPLEMENTATIONS))
def test_another_result_is_seen(operator: str, rehearsed: Callable[[Callable[..., object]], None]) -> None:
    call = next(call for call in CALLS if call.operator == operator)

    def faulty(*arguments: object) -> None:
        compiled_ops.IMPLEMENTATIONS[operator](*arguments)
        output = arguments[call.outputs[0]]
        assert isinstance(output, torch.Tensor)
        output.reshape(-1).view(torch.uint8)[output.element_size() - 1] ^= 0x40

    rehearsed(faulty)
    found = measured(call)
    assert not found.as_declared
    assert found.outside >= 1  # a row that moved moves others, once they are sorted
    assert found.first.startswith("output 0 [")
    rehearsed(compiled_ops.IMPLEMENTATIONS[operator])
    assert measured(call).differing == 0


def test_nan_on_one_side_only_is_seen() -> None:
    call = next(call for call in CALLS if call.operator == "_C::silu_and_mul" and "endless" in call.data)
    here = _copy(call.arguments)
    compiled_ops.IMPLEMENTATIONS[call.operator](*here)
    there = _copy(here)
    output = there[0]
    assert isinstance(output, torch.Tensor)
    where = output.isnan().nonzero()[0]
    output[tuple(where)] = 0.0
    assert compared(call, here, _copy(here)).as_declared
    assert compared(call, here, there).outside == 1


def test_rows_of_one_expert_may_stand_in_any_order(rehearsed: Callable[[Callable[..., object]], None]) -> None:
    call = next(call for call in CALLS if call.operator == fidelity_calls.ALIGN and call.data == "M33 k4 E8 block 16")

    def swapped(expert: bool) -> Callable[..., object]:
        def operator(*arguments: object) -> None:
            compiled_ops.IMPLEMENTATIONS[call.operator](*arguments)
            rows = arguments[3]
            assert isinstance(rows, torch.Tensor)
            other = 1 if expert else 16
            rows[[0, other]] = rows[[other, 0]]

        return operator

    rehearsed(swapped(expert=True))
    assert measured(call).differing == 0
    rehearsed(swapped(expert=False))
    assert measured(call).outside > 0


def test_what_is_raised_is_reported(rehearsed: Callable[[Callable[..., object]], None]) -> None:
    def raising(*_: object) -> None:
        raise RuntimeError("expected scalar type Float\nmore")

    rehearsed(raising)
    assert measured(CALLS[0]).error == "compiled: RuntimeError: expected scalar type Float"


def test_an_operator_that_this_vllm_lacks_is_reported_and_the_others_go_on(
    rehearsed: Callable[[Callable[..., object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed(print)
    monkeypatch.setattr(fidelity, "_compiled", lambda operator: getattr(torch.ops._C, "no_such_operator"))  # noqa: B009
    found = measured(CALLS[0])
    assert found.error.startswith("compiled: AttributeError: '_OpNamespace' '_C' object has no attribute 'no_such_operator'")
    assert not found.as_declared


def test_a_lost_context_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    story = (
        "import json, sys\n"
        "group, part, parts, start = {!r}, {}, {}, {}\n"
        "for number in range(start, 5):\n"
        "    lost = number == 2\n"
        "    print(json.dumps(dict(operator=group, data=str(number), error='CUDA error' * lost, lost=lost)))\n"
        "    if lost: sys.exit(134)\n"
    )
    monkeypatch.setattr(fidelity, "_CHILD", story)
    found: list[Fidelity] = []
    _all_of("g", 0, 1, found.append)
    assert found == [Fidelity(operator="g", data=str(number), error="CUDA error" * (number == 2), lost=number == 2) for number in range(5)]
    monkeypatch.setattr(fidelity, "_CHILD", "import sys; sys.exit('{} {} {} {}: no such operator')")
    with pytest.raises(SubjectUnavailable, match=r"^comparing operators of g ended with exit code 1 after 0: .*no such operator$"):
        _all_of("g", 0, 1, found.append)


def test_the_sign_of_a_zero_is_a_bit_too() -> None:
    call = Call("_C::relu_squared", "zeros", (torch.zeros(4), torch.zeros(4)), (0,))
    here, there = (torch.zeros(4), torch.zeros(4)), (torch.tensor([0.0, -0.0, 0.0, 0.0]), torch.zeros(4))
    found = compared(call, here, there)
    assert (found.differing, found.outside, found.steps) == (1, 1, 0)
    assert found.first == "output 0 [1]: stand-in 0.0, compiled -0.0"
    assert compared(call, here, here).as_declared


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as anybody asks; each process tells what it is told to."""
    monkeypatch.setattr(fidelity, "installed", lambda: ["vllm"])
    story = "import json\nprint(json.dumps(dict(operator={!r}, data='{} {} {}', elements=4, differing=1, outside=OUTSIDE)))"
    monkeypatch.setattr(fidelity, "_CHILD", story.replace("OUTSIDE", "0"))


def test_what_differs_is_printed_and_everything_is_written(
    on_a_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fidelity.main([str(tmp_path / "told")]) == Exit.AS_THE_LEDGER_SAYS
    assert json.loads((tmp_path / "told").read_text())["operator"] == "vllm"
    first, last = capsys.readouterr().out.splitlines()
    assert first.split() == ["vllm", "0", "1", "0", "1/4", "steps", "0", "outside", "0", "allowed"]
    assert last == "1 comparisons, 1 as claimed, 0 not; humming is not installed, its operators were not compared"
    monkeypatch.setattr(fidelity, "_CHILD", fidelity._CHILD.replace("outside=0", "outside=1"))
    assert fidelity.main([]) == Exit.NEWS
    assert "1 comparisons, 0 as claimed, 1 not" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "story", "sentence"),
    [
        (["a", "b"], None, "unrecognized arguments: b"),
        (["--all"], None, "unrecognized arguments: --all"),
        (["nowhere/told"], None, "nowhere/told"),
        ([], "raise ImportError('no _C for {} {} {} {}')", "after 0: ImportError: no _C for vllm 0 1 0"),
    ],
)
def test_misuse_is_one_sentence_and_2(
    on_a_gpu: None,
    arguments: list[str],
    story: str | None,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if story is not None:
        monkeypatch.setattr(fidelity, "_CHILD", story)
    assert fidelity.main(arguments) == Exit.MISUSE
    said = capsys.readouterr().err
    assert said.startswith("fidelity: ")
    assert sentence in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_or_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert fidelity.main([]) == Exit.UNAVAILABLE
    assert capsys.readouterr().err.startswith("fidelity: the compiled operators need an NVIDIA GPU and torch finds none;")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert fidelity.main([]) == Exit.MISUSE
    assert capsys.readouterr().err.startswith("fidelity: vllm is not installed")


def test_help_is_help_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        fidelity.main(["--help"])
    assert ended.value.code == 0
    assert "125, no GPU" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_calls_are_named_tuples_of_cpu_tensors() -> None:
    for call in CALLS:
        assert isinstance(call, Call)
        assert all(each.device.type == "cpu" for each in call.arguments if isinstance(each, torch.Tensor))
