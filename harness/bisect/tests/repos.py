"""Tiny stand-ins: a checkout and an installation of a package called vllm, made of a few lines."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from harness.bisect.installation import Installation

_WHO = {f"GIT_{role}_{what}": value for role in ("AUTHOR", "COMMITTER") for what, value in (("NAME", "A"), ("EMAIL", "a@b.c"))}
HERMETIC = {**_WHO, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


class Checkout:
    """A git repository under construction."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *arguments: str) -> str:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        done = subprocess.run(["git", *arguments], cwd=self.path, env=clean | HERMETIC, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def write(self, files: Mapping[str, str | None]) -> None:
        """Write files; None deletes one."""
        for name, text in files.items():
            if text is None:
                (self.path / name).unlink()
            else:
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                (self.path / name).write_text(text)

    def commit(self, message: str, files: Mapping[str, str | None]) -> str:
        """Write files and commit them; the new commit's full name."""
        self.write(files)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        return self.git("rev-parse", "HEAD")


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file below a folder, .git included, with its bytes and time."""
    found = {}
    for where, folders, names in os.walk(folder):
        for name in [*names, *folders]:
            path = Path(where) / name
            content = hashlib.sha256(path.read_bytes()).hexdigest() + f" {path.stat().st_mtime_ns}" if path.is_file() else "folder"
            found[str(path.relative_to(folder))] = content
    return found


def fake_installation(root: Path, version: str = "0.33.0", humming: str | None = None) -> Installation:
    """A vllm with one 'extension', one generated file and one vendored package."""
    for name, text in {
        "vllm/__init__.py": "from vllm._version import __version__\nfrom vllm.state import STATE\n",
        "vllm/state.py": "STATE = 'installed'\n",
        "vllm/new_module.py": "",
        "vllm/_version.py": f"__version__ = '{version}'\n",
        "vllm/_C.abi3.so": "compiled",
        "vllm/inner/_D.abi3.so": "compiled",
        "vllm/newer_folder/_E.abi3.so": "compiled",
        "vllm/vllm_flash_attn/__init__.py": "FLASH = 'built'\n",
        "vllm/third_party/__init__.py": "",
        "vllm/third_party/vendored/__init__.py": "VENDORED = True\n",
        "vllm/third_party/__pycache__/junk.pyc": "",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Installation(root=root, version=version, humming=humming, entry_points="[vllm.general_plugins]\n")
