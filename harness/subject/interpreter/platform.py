"""A platform that answers vLLM's questions like a GPU and computes on the CPU.

It answers like a Hopper GPU without DeepGEMM, or like a GPU of the architecture that ``MOEDIFF_ARCHITECTURE`` names. vLLM finds it
through the ``vllm.platform_plugins`` entry point. ``register()`` declines unless the interpreter lane was asked for, so that installing
this package changes nothing for a CUDA vLLM.
"""

from __future__ import annotations

import os


def register() -> str | None:
    """Qualified class name when ``MOEDIFF_LANE=interpreter``, else None. Imports nothing: vLLM calls it in every process."""
    if os.environ.get("MOEDIFF_LANE") != "interpreter":
        return None
    return f"{__name__}.InterpreterPlatform"


def __getattr__(name: str) -> type:
    # The class needs vllm.platforms.interface, which must not be imported by a process that only asks register().
    if name != "InterpreterPlatform":
        raise AttributeError(name)
    cls = _make_platform()
    globals()[name] = cls
    return cls


def _make_platform() -> type:
    import torch
    from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

    from harness.subject.interpreter.device import answering

    asked, architecture = answering()

    class InterpreterPlatform(Platform):
        _enum = PlatformEnum.CUDA
        device_name = "interpreter"
        device_type = "cpu"
        dispatch_key = "CPU"
        ray_device_key = "CPU"
        dist_backend = "gloo"
        device_control_env_var = "CUDA_VISIBLE_DEVICES"
        simple_compile_backend = "eager"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*architecture.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return cls.device_name

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return architecture.multiprocessors  # what launch heuristics would see

        @classmethod
        def import_kernels(cls) -> None:
            """The extensions were imported with the driver stub; importing them again from here would find no driver."""

        @classmethod
        def set_device(cls, device: torch.device) -> None:
            """There is one CPU."""

        @classmethod
        def check_and_update_config(cls, vllm_config: object) -> None:
            """Nothing to adjust: no cache, no scheduler, no graph is used."""

        @classmethod
        def supports_fp8(cls) -> bool:
            return architecture.number >= 89

        @classmethod
        def support_deep_gemm(cls) -> bool:
            return asked and architecture.deep_gemm

        @classmethod
        def is_fp8_fnuz(cls) -> bool:
            return False

        @classmethod
        def fp8_dtype(cls) -> torch.dtype:
            return torch.float8_e4m3fn

    InterpreterPlatform.__module__ = __name__
    InterpreterPlatform.__qualname__ = "InterpreterPlatform"
    return InterpreterPlatform
