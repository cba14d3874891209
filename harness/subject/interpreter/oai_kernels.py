"""What stands between Triton's interpreter and triton_kernels, the package whose kernels vLLM's gpt-oss experts launch.

Every launch still runs the package's own lines. It is told that the GPU is an sm80: for Hopper and Blackwell it lays weights out for
instructions that the interpreter does not have.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import linecache
import types
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from harness.architectures import ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TOLD = ARCHITECTURES["sm80"]
Rewriter, Executor = interpreter.FunctionRewriter, interpreter.GridExecutor


def fill() -> bool:
    """Whether this vLLM has the package, with the kernels known here."""
    from vllm.utils.import_utils import has_triton_kernels

    if not has_triton_kernels():
        return False
    names = [f"triton_kernels.{name}" for name in ("matmul_ogs", "specialize")]
    if not all(map(importlib.util.find_spec, names)):  # the package's later form
        return False
    matmul, specialize = map(importlib.import_module, names)
    specialize.specialize = matmul.specialize = _specialize(specialize.specialize)
    matmul.matmul_ogs = _told(matmul.matmul_ogs)
    _find_a_driver()
    fill_closures()
    _take_wrapped_tensors()
    return True


def _find_a_driver() -> None:
    """The package asks the active driver which GPU there is; the interpreter lane has none."""
    target = GPUTarget("cuda", _TOLD.number, 32)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0))


def _told(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with torch.cuda's answers about the GPU."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _answers():
            return function(*args, **kwargs)

    return called


@contextlib.contextmanager
def _answers() -> Iterator[None]:
    kept = torch.cuda.get_device_capability, torch.cuda.get_device_properties
    properties = SimpleNamespace(
        multi_processor_count=_TOLD.multiprocessors, shared_memory_per_block_optin=_TOLD.shared_memory * 1024, name=_TOLD.device
    )
    torch.cuda.get_device_capability, torch.cuda.get_device_properties = lambda *_: _TOLD.capability, lambda *_: properties
    try:
        yield
    finally:
        torch.cuda.get_device_capability, torch.cuda.get_device_properties = kept


def fill_closures() -> bool:
    """A kernel that is defined inside a function is rewritten without what it closes over."""
    with contextlib.suppress(NameError):
        return Rewriter(_closing_over()).rewrite_ast()() != 1
    original = Rewriter.rewrite_ast

    def rewrite_ast(self: Any) -> Any:
        rewritten, enclosed = original(self), inspect.getclosurevars(self.fn).nonlocals
        if not enclosed or rewritten is self.fn:
            return rewritten
        scope = {**rewritten.__globals__, **enclosed}
        whole = types.FunctionType(rewritten.__code__, scope, rewritten.__name__, rewritten.__defaults__, rewritten.__closure__)
        whole.__kwdefaults__, whole.__annotations__ = rewritten.__kwdefaults__, rewritten.__annotations__
        return whole

    Rewriter.rewrite_ast = rewrite_ast
    return True


def _closing_over() -> Callable[[], int]:
    enclosed = 1

    def kernel() -> int:
        return enclosed

    return kernel


def _take_wrapped_tensors() -> None:
    """The package's Tensor has a data pointer, which a launch takes, and no storage, which the interpreter asks for."""
    original = Executor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})

    Executor.__call__ = call


def _plain(argument: Any) -> Any:
    if type(argument) is tuple:
        return tuple(map(_plain, argument))
    held = getattr(getattr(argument, "storage", None), "data", None)
    wrapped = not isinstance(argument, torch.Tensor) and hasattr(argument, "data_ptr") and isinstance(held, torch.Tensor)
    return held if wrapped else argument


def _specialize(original: Callable[..., Any]) -> Callable[..., Any]:
    """The package writes the source of a kernel with its activation named in it: made into an interpreted function."""

    def specialize(
        fn: Any, module: Any, constants: dict[str, Any], tuples: Any, name: str | None = None, do_not_specialize: Any = ()
    ) -> Any:
        if not isinstance(fn, interpreter.InterpretedFunction):
            return original(fn, module, constants, tuples, name, do_not_specialize)
        made = original(JITFunction(fn.fn), module, constants, tuples, name, do_not_specialize)
        named = {each.__name__: each for each in constants.values() if each is not None}
        scope = {key: _value(each) for key, each in {**fn.fn.__globals__, **made.fn.__globals__, **named}.items()}
        file = f"<{module.__name__}.{made.__name__}>"
        linecache.cache[file] = (len(made.src), None, made.src.splitlines(keepends=True), file)
        found: dict[str, Any] = {}
        exec(compile(made.src, file, "exec"), scope, found)
        return interpreter.InterpretedFunction(found[made.__name__])

    return specialize


def _value(each: Any) -> Any:
    return each.value if isinstance(each, tl.constexpr) else each
