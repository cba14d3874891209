"""The same loaded layer on a GPU in other ways: replayed as a graph, compiled, on poisoned memory, with or without swapped operands."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from harness.subject import RunFailed, device, vllm_compat
from harness.subject.errors import verbatim
from harness.subject.hygiene import pristine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cases.batch import Batch
    from harness.subject import Loaded

_GRANULE, _SMALL_POOL = 512, 2**20  # bytes: what the caching allocator rounds to; the largest request that its small pool serves
_WAIT, _WAITS = 10_000_000, 4  # cycles, of some 2 GHz; two such waits are longer than another thread may hold Python's lock
_LARGE, _MANY = 64 * 2**20, 16  # more than any buffer of a case; so many blocks of the small pool


class Mode(StrEnum):
    """How a forward is executed."""

    EAGER = "eager"
    GRAPH = "CUDA graph"
    COMPILED = "torch.compile(fullgraph=True)"


def prepare(
    config: Any, function: Callable[..., torch.Tensor], inputs: Callable[[Batch], tuple[torch.Tensor, ...]], batch: Batch, mode: Mode
) -> Callable[[Batch], torch.Tensor]:
    """``function`` of the buffers that ``inputs`` fills, prepared on ``batch``; called with a batch of its shape: output [M, H] on the CPU.

    Raises:
        RunFailed: vLLM raised, here or when the result is called.
    """
    buffers = tuple(each.to("cuda", copy=True) for each in inputs(batch))
    run = {Mode.EAGER: lambda f, b: f, Mode.GRAPH: _graph, Mode.COMPILED: _compiled}[mode]

    def within(what: Callable[[], Any]) -> Any:
        try:
            with pristine(), vllm_compat.forward_context(config, batch.hidden_states.shape[0]):
                return what()
        except Exception as error:
            raise RunFailed(verbatim(error)) from error

    ready = within(lambda: run(function, buffers))

    def call(given: Batch) -> torch.Tensor:
        for buffer, value in zip(buffers, inputs(given), strict=True):
            buffer.copy_(value)
        return within(lambda: ready(*buffers).detach().cpu().clone())

    return call


def _graph(function: Callable[..., torch.Tensor], buffers: tuple[torch.Tensor, ...]) -> Callable[..., torch.Tensor]:
    """Warmed up on a side stream, captured once; its output is overwritten before each replay."""
    held = tuple(buffer.clone() for buffer in buffers)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function(*buffers)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    for buffer, value in zip(buffers, held, strict=True):
        buffer.copy_(value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function(*buffers)

    def replay(*_: torch.Tensor) -> torch.Tensor:
        output.view(torch.uint8).fill_(0xFF)
        graph.replay()
        return output

    return replay


def _compiled(function: Callable[..., torch.Tensor], buffers: tuple[torch.Tensor, ...]) -> Callable[..., torch.Tensor]:
    torch.compiler.reset()
    compiled: Callable[..., torch.Tensor] = torch.compile(function, fullgraph=True)
    compiled(*(buffer.clone() for buffer in buffers))
    return compiled


def scale_in_place(loaded: Loaded, factor: float) -> tuple[str, ...]:
    """Multiply every weight scale of the loaded layer, in place; their names. A power of two, so that each format holds the product."""
    changed = []
    for name, tensor in loaded.parameters.items():
        if "scale" not in name or "input" in name or name.startswith(("a1", "a2")) or not tensor.numel():
            continue
        if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16):
            tensor.mul_(factor)
        elif tensor.dtype is getattr(torch, "float8_e8m0fnu", None):
            exponents = tensor.view(torch.uint8)
            padded = not bool((exponents & 7).any())  # Humming's fp16 kernels: E5M0, its three low bits unread
            exponents.add_((int(factor).bit_length() - 1) << 3 * padded)
        else:
            continue
        changed.append(name)
    return tuple(changed)


def poison(byte: int) -> None:
    """Fill memory that the allocator will hand out next with ``byte``: workspaces are dropped, its cached blocks overwritten.

    Raises:
        RuntimeError: fresh memory does not hold ``byte`` afterwards.
    """
    vllm_compat.drop_workspaces()
    gc.collect()  # now, not while blocks are filled: what it frees would be left out
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = [torch.empty(size, dtype=torch.uint8, device="cuda").fill_(byte) for size in (_LARGE, *[_SMALL_POOL] * _MANY)]
    for size in free_pieces(torch.cuda.memory_snapshot()):
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda").fill_(byte))
    for _ in range(_unused("small_pool") // _GRANULE):
        held.append(torch.empty(_GRANULE, dtype=torch.uint8, device="cuda").fill_(byte))
    torch.cuda.synchronize()
    held.clear()
    for size in (_GRANULE, 2**16, _SMALL_POOL, 2**23):
        if not bool((torch.empty(size, dtype=torch.uint8, device="cuda").cpu() == byte).all()):  # compared here: that allocates too
            raise RuntimeError(f"{size} bytes of fresh device memory do not hold 0x{byte:02x} after poisoning")


@contextlib.contextmanager
def lagging() -> Iterator[None]:
    """A stream of its own is current, with fresh memory full of 0x7f, and lags behind the host all the while.

    vLLM's ``current_stream`` (``utils/torch_utils.py``) makes a stream of its own the current one, before a model is loaded where there
    are several ranks. Work on the legacy default stream, cudaMemcpy among it, does not wait for such a stream, nor it for that.
    """
    stream, stop, busy = torch.cuda.Stream(), threading.Event(), threading.Event()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        poison(0x7F)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(_wait_on, stream, stop, busy)
            try:
                while not busy.wait(0.01) and not waits.done():
                    pass
                yield
            finally:
                stop.set()
            waits.result()
    torch.cuda.synchronize()


def _wait_on(stream: torch.cuda.Stream, stop: threading.Event, busy: threading.Event) -> None:
    """Until ``stop``, the stream holds so many waits not yet over. One that the host waits for has others behind it by then.

    A thread and no dispatch mode: under a mode torch.compile compiles nothing, and the bits may be others.
    """
    with torch.cuda.stream(stream):
        pending: collections.deque[torch.cuda.Event] = collections.deque()
        while not stop.is_set():
            while pending and pending[0].query():
                pending.popleft()
            if len(pending) < _WAITS:
                torch.cuda._sleep(_WAIT)
                pending.append(stream.record_event())
                continue
            busy.set()
            time.sleep(0.001)


def free_pieces(segments: Sequence[Mapping[str, Any]]) -> list[int]:
    """Sizes to ask the caching allocator for, largest first, so that every free block is handed out whole.

    A block of the large pool is not split when no more than a mebibyte would be left, so it is asked for as it is; a request for more than
    a mebibyte does not go to the small pool, whose blocks are asked for in two parts. segments: ``torch.cuda.memory_snapshot()``.
    """
    pieces: list[int] = []
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                continue
            size = block["size"]
            parts = (size,) if segment["segment_type"] == "large" or size <= _SMALL_POOL else (_SMALL_POOL, size - _SMALL_POOL)
            pieces += parts
    return sorted(pieces, reverse=True)


def _unused(pool: str) -> int:
    """Bytes that the caching allocator holds in a pool and has not handed out."""
    stats = torch.cuda.memory_stats()
    return stats[f"reserved_bytes.{pool}.current"] - stats[f"allocated_bytes.{pool}.current"]


@contextlib.contextmanager
def operand_swaps(allowed: bool) -> Iterator[list[bool]]:
    """Whether each GEMM swaps its operands, appended as it is asked (Triton) or told (CUTLASS); not ``allowed``: Triton's never does."""
    seen: list[bool] = []
    with contextlib.ExitStack() as stack:
        for owner, name in vllm_compat.swap_choices():
            original = getattr(owner, name)
            setattr(owner, name, _telling(original, allowed, seen))
            stack.callback(setattr, owner, name, original)
        yield seen


def _telling(original: Callable[..., Any], allowed: bool, seen: list[bool]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        if answer is None:
            seen.append(bool(signature.bind(*args, **kwargs).arguments["swap_ab"]))
            return None
        seen.append(bool(answer and allowed))
        return seen[-1]

    return choose


def free_bytes() -> int:
    """Device memory this process may still take: what is free, of its own part."""
    free, total = torch.cuda.mem_get_info()
    return min(free + torch.cuda.memory_reserved(), int(total * device.share())) - torch.cuda.memory_allocated()
