"""Make this process drive vLLM through Triton's interpreter, on the CPU.

Order matters and is enforced: ``prepare_environment()`` before vllm and triton are imported, ``activate()`` afterwards and
once. Neither does anything to a process that does not call it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from harness.subject import SubjectUnavailable
from harness.subject.interpreter import libcuda

if TYPE_CHECKING:
    from collections.abc import Iterable

LANE_VARIABLE = "MOEDIFF_LANE"
LANE = "interpreter"
ENTRY_POINT_GROUP = "vllm.platform_plugins"
ENTRY_POINT_NAME = "moediff_interpreter"
ENTRY_POINT_VALUE = "harness.subject.interpreter.platform:register"

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",  # read by triton when a kernel is decorated
    "CUDA_VISIBLE_DEVICES": "",
    LANE_VARIABLE: LANE,
}
DEFAULTS = {  # what the user has set wins
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",  # vLLM compiles small helpers; tracing one costs seconds, and the code is the same uncompiled
    # Unset, importing cutlass (vLLM does) creates a directory in the temporary one; nothing is compiled in this lane.
    "CUTE_DSL_CACHE_DIR": os.devnull,
    "CUTE_EXPERIMENTAL_DSL_CACHE_DIR": os.devnull,
}

_activated = False


class _SourceTree(importlib.metadata.Distribution):
    """The entry point of pyproject.toml, for a source tree that is only on the path and was never installed."""

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return "Metadata-Version: 2.1\nName: moediff-source-tree\nVersion: 0\n"
        if filename == "entry_points.txt":
            return f"[{ENTRY_POINT_GROUP}]\n{ENTRY_POINT_NAME} = {ENTRY_POINT_VALUE}\n"
        return None

    def locate_file(self, path: object) -> object:  # type: ignore[override]
        raise FileNotFoundError(path)


class _SourceTreeFinder(importlib.metadata.DistributionFinder):
    """Finds that one distribution, and no module."""

    def find_spec(self, *_: object) -> None:
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        return [_SourceTree()] if context is None or context.name is None else []


def prepare_environment() -> None:
    """Set what triton, torch and vLLM read while they are imported.

    Raises:
        SubjectUnavailable: when it is too late, naming the module that was imported first.
    """
    late = [name for name in ("triton", "vllm") if name in sys.modules]
    wrong = [name for name, value in ENVIRONMENT.items() if os.environ.get(name) != value]
    if late and wrong:
        raise SubjectUnavailable(
            f"{late[0]} was imported before the interpreter lane was prepared: call prepare_environment() first, or start the "
            "process with " + " ".join(f"{name}={ENVIRONMENT[name]!r}" for name in wrong)
        )
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise SubjectUnavailable("CUDA was initialised before the interpreter lane was prepared: call prepare_environment() first")
    os.environ.update(ENVIRONMENT)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    _keep_torch_out_of_the_temporary_directory()


def _keep_torch_out_of_the_temporary_directory() -> None:
    """Importing torch's compiler creates its cache directory, used or not; it goes beside ours where that can be written."""
    directory = libcuda.cache_directory() / "torchinductor"
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(directory))


def activate() -> None:
    """Load the compiled extensions without a driver, take vLLM's platform slot, fill operators and Triton's gaps. Idempotent.

    Raises:
        SubjectUnavailable: no vLLM, no compiler for the driver stub, or vLLM settled on another platform.
    """
    global _activated
    if _activated:
        return
    prepare_environment()
    if importlib.util.find_spec("vllm") is None:
        raise SubjectUnavailable("vllm is not installed in this environment: install vllm, or run `tox run -e interpreter`")
    if not any(point.name == ENTRY_POINT_NAME for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)):
        sys.meta_path.append(_SourceTreeFinder())

    libcuda.load_stub()
    libcuda.import_extensions()

    import vllm.platforms

    current = type(vllm.platforms.current_platform)
    if current.__module__ != ENTRY_POINT_VALUE.partition(":")[0]:
        raise SubjectUnavailable(
            f"vLLM settled on {current.__module__}.{current.__name__} instead of the interpreter platform: start a process that has "
            f"not imported vllm, and let VLLM_PLUGINS (now {os.environ.get('VLLM_PLUGINS')!r}) name {ENTRY_POINT_NAME}"
        )

    from harness.subject.interpreter import compiled_ops, device, oai_kernels, triton_gaps, triton_speed

    asked, architecture = device.answering()
    if asked:
        device.answer(architecture)
    device.never_capture()
    compiled_ops.register()
    triton_gaps.fill()
    triton_speed.apply()
    oai_kernels.fill()
    _activated = True
