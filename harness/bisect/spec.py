"""States by name: ``NAME=BASE+PATCH+PATCH``, BASE a release, a directory or a revision. Parsing only; nothing is built here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from harness.bisect.trouble import StateError

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A vLLM release by its version, ``release:0.33.0``."""

    version: str

    def __str__(self) -> str:
        return f"release:{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A commit of the checkout at ``repository``."""

    repository: Path
    revision: str

    def __str__(self) -> str:
        return self.revision


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """A folder that holds ``vllm/__init__.py``, taken as it lies, uncommitted changes included."""

    path: Path

    def __str__(self) -> str:
        return f"dir:{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One vLLM to drive."""

    name: str
    base: Release | Revision | Directory
    patches: tuple[Path, ...] = ()

    def __str__(self) -> str:
        return "+".join([str(self.base), *map(str, self.patches)])


def parse(text: str, repository: Path | None) -> State:
    """``[NAME=]BASE[+PATCH]…``; a BASE that is neither ``release:`` nor ``dir:`` nor a folder is a revision of ``repository``.

    Raises:
        StateError: a patch or folder that is not there, or a revision without a repository.
    """
    name, equals, spec = text.partition("=")
    if not equals:
        name, spec = text, text
    elif not _NAME.fullmatch(name):
        raise StateError(f"'{name}' in '{text}' is no name for a state: use letters, digits, '_', '.' and '-'")
    base, *patches = spec.split("+")
    for patch in patches:
        if not Path(patch).is_file():
            raise StateError(f"state '{name}': there is no patch file {patch}")
    return State(name=name, base=_base(name, base, repository), patches=tuple(Path(p) for p in patches))


def _base(name: str, base: str, repository: Path | None) -> Release | Revision | Directory:
    kind, colon, rest = base.partition(":")
    if colon and kind == "release":
        if not re.fullmatch(r"\d+(\.\d+)*([a-z]+\d+)?(\.post\d+)?", rest):
            raise StateError(f"state '{name}': '{rest}' is no release; write release:0.33.0")
        return Release(version=rest)
    folder = Path(rest if colon and kind == "dir" else base)
    if (folder / "vllm" / "__init__.py").is_file():
        return Directory(path=folder.resolve())
    if colon and kind == "dir":
        raise StateError(f"state '{name}': {folder} holds no vllm/__init__.py: name the root of a vLLM checkout")
    if not base:
        raise StateError(f"state '{name}' is empty: write a revision, release:X.Y.Z or dir:PATH")
    if repository is None:
        raise StateError(f"state '{name}': '{base}' is taken for a revision, and no checkout was named: add --repo PATH")
    return Revision(repository=repository, revision=base)
