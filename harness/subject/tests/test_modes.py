"""What of the GPU's modes can be seen without one: that something was compiled, and what is noted of swapped operands and of GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from harness.subject import modes, observe, vllm_compat


@pytest.fixture
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile without a C++ compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@pytest.mark.vllm  # torch's compiler imports triton, which the interpreter lane must be prepared for
@pytest.mark.parametrize("off", [False, True])
def test_a_compiler_that_is_switched_off_is_no_pass(interpreter: None, eager_backend: None, off: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with torch._dynamo.config.patch(disable=off):
        if off:
            with pytest.raises(RuntimeError, match="no compiled frames"):
                modes._compiled(function, (torch.ones(2),))
        else:
            assert modes._compiled(function, (torch.ones(2),))(torch.ones(2)).tolist() == [2.0, 2.0]


def asked(block_m: int, block_n: int) -> bool:
    """As Triton's."""
    return block_m < block_n


def told(offsets: list[int], swap_ab: bool, more: int = 0) -> None:
    """As CUTLASS's."""


@pytest.mark.parametrize("allowed", [True, False])
def test_who_is_asked_or_told_to_swap_is_noted_however_it_is_called(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(asked=asked, told=told)
    monkeypatch.setattr(vllm_compat, "swap_choices", lambda: [(module, "asked"), (module, "told")])
    with modes.operand_swaps(allowed) as seen:
        assert module.asked(16, block_n=64) is allowed
        assert module.asked(64, 16) is False
        module.told([1], True)
        module.told([1], swap_ab=False, more=3)
    assert seen == [allowed, False, True, False]
    assert (module.asked, module.told) == (asked, told)


def gemm(A: torch.Tensor, B: int = 0) -> int:
    """As a launcher."""
    return B


@pytest.mark.parametrize("call", [lambda f, a: f(a, 3), lambda f, a: f(A=a, B=3), lambda f, a: f(B=3, A=a)], ids=["place", "name", "order"])
def test_the_first_argument_is_noted_however_it_is_given(call: Callable[..., int]) -> None:
    module, seen = SimpleNamespace(gemm=gemm), list[object]()
    with observe._wrapped(module, "gemm", seen.append):
        assert call(module.gemm, a := torch.ones(1)) == 3
    assert seen == [a]
    assert module.gemm is gemm
