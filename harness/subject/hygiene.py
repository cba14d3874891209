"""Leave nothing behind: process-wide state as it was, whatever happens in between."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


TALKATIVE = ("vllm", "torch._opaque_base", "torch._library.opaque_object", "torch.utils.cpp_extension", "torch.distributed")


def quiet() -> None:
    """Loggers that talk while vLLM is imported and layers are built speak only from ERROR up, unless VLLM_LOGGING_LEVEL says less."""
    if os.environ.get("VLLM_LOGGING_LEVEL", "ERROR") == "ERROR":
        for name in TALKATIVE:
            logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def pristine() -> Iterator[None]:
    """Restore default dtype and device, CUDA stream, grad mode, random state, thread count, environment, directory,
    exception hook and warning filters.

    vLLM's own contexts (config, forward context) restore themselves and are entered inside this one.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    random_state = torch.random.get_rng_state()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    held = os.environ._data  # as bytes: decoding all of it six times a pair takes as long as a small layer's forward
    environment, directory, excepthook = dict(held), os.getcwd(), sys.excepthook
    try:
        with warnings.catch_warnings():
            yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        torch.set_grad_enabled(grad)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            torch.use_deterministic_algorithms(deterministic)
        torch.random.set_rng_state(random_state)
        if held != environment:
            os.environ.clear()
            os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()})
        if os.getcwd() != directory:
            os.chdir(directory)
        sys.excepthook = excepthook  # torch.distributed installs one that prefixes every line with the rank
        _back_to(stream)  # last: on a device that is lost it raises


def _back_to(stream: torch.cuda.Stream | None) -> None:
    """vLLM's ``current_stream`` makes a stream of its own the current one for good. None: CUDA was not initialised before."""
    if not torch.cuda.is_initialized():
        return
    before, now = stream or torch.cuda.default_stream(), torch.cuda.current_stream()
    if now != before:
        before.wait_stream(now)
        torch.cuda.set_stream(before)
