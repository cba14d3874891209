"""The installed vLLM whose compiled extensions every tree borrows. Found, never imported."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import sys
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from harness.bisect.trouble import StateError


def is_compiled(name: str) -> bool:
    """True for files of a wheel that a compiler made."""
    return name.endswith(".so") or name == "vllm-rs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """A folder holding a built ``vllm``."""

    root: Path
    version: str
    humming: str | None = None  # version of humming-kernels, None when it is not installed
    entry_points: str = ""

    @classmethod
    def find(cls) -> Installation:
        """The vLLM of this environment.

        Raises:
            StateError: there is none with compiled extensions.
        """
        try:
            package = metadata.distribution("vllm")
        except metadata.PackageNotFoundError:
            package = None
        candidates = [Path(str(package.locate_file("")))] if package else []
        candidates += [Path(entry) for entry in sys.path if entry]
        if (spec := util.find_spec("vllm")) and spec.origin:  # an editable installation
            candidates.append(Path(spec.origin).parent.parent)
        root = next((folder.resolve() for folder in candidates if any((folder / "vllm").glob("*.so"))), None)
        if package is None or root is None:
            raise StateError("no vLLM with compiled extensions is installed here, and every state borrows them: `pip install vllm`")
        return cls(
            root=root,
            version=package.version,
            humming=_version("humming-kernels"),
            entry_points=package.read_text("entry_points.txt") or "",
        )

    @property
    def identity(self) -> str:
        """Differs between installations that differ in their compiled files."""
        compiled = sorted(file for file in (self.root / "vllm").rglob("*.so"))
        stated = [f"{file.relative_to(self.root)} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in compiled]
        return "\n".join([str(self.root), self.version, *stated])

    def pristine(self) -> bool:
        """True when every Python file is as the wheel's RECORD states it, so that it may stand for its release."""
        record = self.root / f"vllm-{self.version}.dist-info" / "RECORD"
        if not record.is_file():
            return False
        for name, stated, _ in csv.reader(io.StringIO(record.read_text())):
            if name.startswith("vllm/") and name.endswith(".py"):
                file = self.root / name
                if not file.is_file() or _digest(file) != stated:
                    return False
        return True


def _digest(file: Path) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
