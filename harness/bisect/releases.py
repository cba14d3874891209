"""Packages of the registry, by name: a wheel unpacked into a folder, and which releases of vLLM exist.

Goes through the user's own client, ``uv`` (its cache makes a second time cheap) or ``pip``, with the user's own settings.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from harness.bisect.repository import last_line
from harness.bisect.trouble import StateError, StateUnavailable


def unpack(requirement: str, into: Path) -> None:
    """Unpack the wheel of ``NAME==VERSION`` below ``into``, without its dependencies.

    Raises:
        StateError: neither uv nor pip is installed.
        StateUnavailable: the client did not get it; its last line is quoted.
    """
    common = ["--no-deps", "--only-binary", ":all:", "--target", str(into), requirement]
    if uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--quiet", "--no-progress", "--python", sys.executable, *common]
    else:
        command = [*_pip(), "install", "--quiet", "--disable-pip-version-check", *common]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise StateUnavailable(f"the wheel of {requirement} could not be had: {_reason(done.stderr)}")
    shutil.rmtree(into / "bin", ignore_errors=True)


def unpack_with_needs(requirement: str, into: Path) -> None:
    """As ``unpack``, and beside it whatever it requires that is not installed here in any version. Raises as ``unpack``."""
    unpack(requirement, into)
    stated = [line for file in into.glob("*.dist-info/METADATA") for line in file.read_text().splitlines()]
    for line in stated:
        kind, _, text = line.partition(": ")
        if kind == "Requires-Dist":
            needed = Requirement(text)
            if (needed.marker is None or needed.marker.evaluate({"extra": ""})) and not _installed(needed.name):
                unpack(f"{needed.name}{needed.specifier}", into)


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def between(good: str, bad: str) -> tuple[str, ...]:
    """vLLM's final releases from ``good`` to ``bad``, both included, oldest first. Raises StateError when one is not listed."""
    done = subprocess.run([*_pip(), "index", "versions", "vllm"], capture_output=True, check=False)
    if done.returncode:
        raise StateError(f"the releases of vllm could not be listed: {_reason(done.stderr)}; name them with --releases A,B,C")
    listed = re.search(r"Available versions: (.*)", done.stdout.decode())
    versions = sorted(listed[1].split(", "), key=order) if listed else []
    for version in (good, bad):
        if version not in versions:
            raise StateError(f"the registry lists no release {version} of vllm; name the releases to search with --releases A,B,C")
    return tuple(versions[versions.index(good) : versions.index(bad) + 1])


def order(version: str) -> tuple[int, ...]:
    """Sorts releases by age."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _pip() -> list[str]:
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
        return [sys.executable, "-m", "pip"]
    if pip := shutil.which("pip"):
        return [pip]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise StateError(
        "neither uv nor pip is installed, so no release can be fetched: install one of them, or unpack the wheel and name dir:PATH"
    )


def _reason(stderr: bytes) -> str:
    """What the client complained of, on one line."""
    lines = [line.strip(" │╰─▶×╭") for line in stderr.decode(errors="replace").splitlines()]
    told = [line for line in lines if line and not line.startswith(("WARNING", "warning", "hint"))]
    return " ".join(told[:3]) if told else last_line(stderr)
