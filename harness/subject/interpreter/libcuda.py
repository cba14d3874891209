"""A libcuda.so.1 that knows no device.

vLLM's compiled extensions are linked against the CUDA driver only to look for devices; their operator *schemas* register
without one. The stub exports the driver functions they name, each returning 100 (CUDA_ERROR_NO_DEVICE).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.exits import Exit
from harness.subject import SubjectUnavailable

SONAME = "libcuda.so.1"
NO_DEVICE = 100
FUNCTIONS = ("cuInit", "cuDriverGetVersion", "cuGetProcAddress_v2", "cuPointerGetAttribute", "cuTensorMapEncodeTiled")
_UNDEFINED = re.compile(r"undefined symbol: (cu[A-Z]\w*)")


class NoCompiler(SubjectUnavailable):
    """This machine lacks what the lane needs."""

    exit = Exit.UNAVAILABLE


def compiler() -> list[str]:
    """The command of a C compiler.

    Raises:
        NoCompiler: there is none; the sentence names both ways out.
    """
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise NoCompiler(
        "the interpreter lane needs a C compiler once, to build a stub of libcuda: install cc (gcc or clang), "
        "or the ziglang package from the package registry (pip install ziglang)"
    )


def source(functions: tuple[str, ...] = FUNCTIONS) -> str:
    """C text of the stub. Arguments are left undeclared: nothing is read or written."""
    return "".join(f"int {name}() {{ return {NO_DEVICE}; }}\n" for name in functions)


def cache_directory() -> Path:
    """Where built stubs are kept: ``$XDG_CACHE_HOME/moediff`` or ``~/.cache/moediff``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "moediff"


def path_of(functions: tuple[str, ...], directory: Path) -> Path:
    """Where the stub with these functions is kept; machines of several architectures may share a home."""
    return directory / f"libcuda-{platform.machine()}-{hashlib.sha256(source(functions).encode()).hexdigest()[:16]}.so"


def require() -> None:
    """Raises NoCompiler when the stub is not there and cannot be built."""
    if not path_of(FUNCTIONS, cache_directory()).exists():
        compiler()


def build(functions: tuple[str, ...], directory: Path) -> Path:
    """The shared object for ``functions`` in ``directory``, compiled unless an identical one is there.

    Safe when several processes build at once: each compiles under a name of its own, the last rename wins, all are equal.
    """
    text, path = source(functions), path_of(functions, directory)
    if path.exists():
        return path
    command = compiler()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        c_file, object_file = Path(scratch, "stub.c"), Path(scratch, "stub.so")
        c_file.write_text(text)
        command += ["-shared", "-fPIC", f"-Wl,-soname,{SONAME}", "-o", str(object_file), str(c_file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SubjectUnavailable(
                f"the C compiler could not build the libcuda stub ({' '.join(command[:4])} ended with {done.returncode}: "
                f"{done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'no message'}); "
                "install a working cc, or the ziglang package from the package registry"
            )
        object_file.replace(path)
    return path


def load_stub(functions: tuple[str, ...] = FUNCTIONS) -> None:
    """Load the stub so that later ``dlopen`` calls find its soname and its symbols.

    Raises:
        SubjectUnavailable: no compiler, a compiler that fails, or nowhere to load what it made from.
    """
    try:
        _load(build(functions, cache_directory()))
    except OSError:  # a home that is read-only, full or damaged: use a private directory and forget it, a loaded object needs no file
        try:
            with tempfile.TemporaryDirectory() as private:
                _load(build(functions, Path(private)))
        except OSError as error:
            raise SubjectUnavailable(
                f"the libcuda stub can be built and loaded neither in {cache_directory()} nor in a temporary directory ({error}); "
                "let XDG_CACHE_HOME or TMPDIR name a directory that can be written and holds programs"
            ) from error


def _load(path: Path) -> None:
    """Raises OSError."""
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _extensions() -> tuple[str, ...]:
    spec = importlib.util.find_spec("vllm")
    places = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for place in places for pattern in ("_C*.so", "_moe_C*.so") for file in Path(place).glob(pattern))
    if not files:
        raise SubjectUnavailable(
            f"no compiled extension (_C*.so, _moe_C*.so) beside vllm in {places}: install vllm's CUDA wheel, not a source tree"
        )
    return tuple(f"vllm.{file.name.split('.')[0]}" for file in files)


def import_extensions() -> tuple[str, ...]:
    """Import every extension of vLLM that registers operators for ``_C`` and ``_moe_C``; names found, sorted.

    An extension that names a driver function the stub lacks gets a second stub with it.

    Raises:
        SubjectUnavailable: there is none, or one cannot be imported.
    """
    names = _extensions()
    for name in names:
        asked: set[str] = set()
        while True:
            try:
                importlib.import_module(name)
                break
            except ImportError as error:
                missing = _UNDEFINED.search(str(error))
                if missing is None or missing[1] in asked:
                    raise SubjectUnavailable(f"vLLM's extension {name} cannot be imported: {error}") from error
                asked.add(missing[1])
                load_stub((missing[1],))
    return names
