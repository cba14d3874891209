"""What code that looks past vLLM's platform is told about the device: torch.cuda's queries, and Humming's own.

Only where an architecture was asked for. Nothing pretends that a kernel can be launched: an operator without a CPU
implementation still ends in torch's NotImplementedError, which names it.
"""

from __future__ import annotations

import contextlib
import importlib.util
from types import SimpleNamespace
from typing import TYPE_CHECKING

from harness.architectures import ARCHITECTURES, requested

if TYPE_CHECKING:
    from harness.architectures import Architecture

UNASKED = ARCHITECTURES["sm90"]
_TOPS = (  # times FP16, first architecture: humming/csrc/device_info.cpp
    ("float16", 1, 75),
    ("bfloat16", 1, 80),
    ("int8", 2, 75),
    ("int4", 4, 75),
    ("float8e4m3", 2, 89),
    ("float8e5m2", 2, 89),
    ("float8e3m4", 2, 100),
    ("float4e2m1", 4, 100),
)


def answering() -> tuple[bool, Architecture]:
    """Whether an architecture was asked for, and the one that is answered as. Raises Misuse."""
    asked = requested()
    return asked is not None, asked or UNASKED


def never_capture() -> None:
    """Code that asks whether a stream is capturing is told no; without a device torch has no stream to ask."""
    import torch

    torch.accelerator.current_stream = lambda *_: SimpleNamespace(is_capturing=lambda: False)


def answer(architecture: Architecture) -> None:
    """Patch the queries. Once per process, after the platform took its place and before layers are built."""
    _torch(architecture)
    if importlib.util.find_spec("humming") is not None:
        _humming(architecture)


def _torch(architecture: Architecture) -> None:
    import torch

    major, minor = architecture.capability
    properties = SimpleNamespace(
        name=architecture.device,
        major=major,
        minor=minor,
        multi_processor_count=architecture.multiprocessors,
        shared_memory_per_block_optin=architecture.shared_memory * 1024,
        is_integrated=False,
    )
    torch.cuda.current_device = torch.accelerator.current_device_index = lambda: 0
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    torch.cuda.get_device_capability = lambda *_: architecture.capability
    torch.cuda.get_device_name = lambda *_: architecture.device
    torch.cuda.get_device_properties = lambda *_: properties


def _humming(architecture: Architecture) -> None:
    """humming/device.py asks a native extension that links against the driver, and humming/ops asserts CUDA tensors."""
    import humming.device
    import humming.ops.weight

    major, minor = architecture.capability
    told = SimpleNamespace(
        index=0,
        name=architecture.device,
        is_ppu=False,
        sm_count=architecture.multiprocessors,
        sm_major=major,
        sm_minor=minor,
        sm_version=architecture.number,
        default_smem_size=48 * 1024,
        max_smem_size=architecture.shared_memory * 1024,
        max_threads_per_block=1024,
        max_threads_per_sm=architecture.threads,
        max_registers_per_sm=64 * 1024,
        l2_cache_size=architecture.l2 * 1024 * 1024,
        memory_bandwidth_gbps=architecture.bandwidth,
        tensorcore_tops={name: architecture.fp16_tops * times for name, times, since in _TOPS if architecture.number >= since},
    )
    the_device = humming.device.current_device
    the_device._value = told
    humming.device.DeviceInfo.__new__ = staticmethod(lambda _cls, _index=None: the_device)
    humming.ops.weight._should_use_torch_op = lambda _: True  # through the dispatcher, which knows what a CPU has
