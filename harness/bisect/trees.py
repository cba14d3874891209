"""From a state to folders that go first on Python's path: sources of the state over the compiled extensions of an installed release.

The extensions use torch's stable ABI, so those of one release serve sources of another. What a build adds to vLLM's sources and is missing
in a revision is linked from the installation: extensions, ``vllm_flash_attn`` and ``third_party``, generated protocol files; the version
file and the package metadata are written anew. A change to ``csrc`` is therefore never seen, which a report must say.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from harness.bisect import releases
from harness.bisect.cache import Cache
from harness.bisect.installation import Installation, is_compiled
from harness.bisect.repository import SOURCES, Repository, apply_patch
from harness.bisect.spec import Directory, Release, Revision, State

_FORMAT = "2"  # part of every key: raise it when trees are built differently
_BUILT_FOLDERS = ("vllm_flash_attn", "third_party")  # filled by vLLM's build, partly or wholly
_HUMMING = re.compile(r"^(?:Requires-Dist: *)?humming-kernels *(?:\[[^]]*\])? *== *([\w.]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A state that can be imported. ``paths`` go first on PYTHONPATH (none: the installation itself)."""

    state: State
    key: str  # equal for two states exactly when the same code would run
    paths: tuple[Path, ...]
    version: str  # of vLLM, as the tree reports it
    sha: str = ""  # of a revision
    notes: tuple[str, ...] = ()  # what a reader must know: uncommitted changes left out, other humming
    sources: Path | None = None  # the folder that vllm must come from, when it is not the installation's

    @property
    def stated(self) -> str:
        """``NAME=BASE+PATCH…`` with a revision's full name, which no later commit changes."""
        base = self.sha if isinstance(self.state.base, Revision) else str(self.state.base)
        whole = "+".join([base, *map(str, self.state.patches)])
        return whole if whole == self.state.name else f"{self.state.name}={whole}"


@contextmanager
def planted(state: State, cache: Cache, installed: Installation) -> Iterator[Tree]:
    """Build (or find) the trees of a state and hold them until the block ends.

    Raises:
        StateError: the state does not exist.
        StateUnavailable: it exists, and cannot be built: a patch that does not apply, a wheel that cannot be had.
    """
    with ExitStack() as held:
        match state.base:
            case Release(version=version):
                tree = _release(state, version, cache, installed, held)
            case Revision(repository=path, revision=revision):
                tree = _revision(state, Repository.at(path), revision, cache, installed, held)
            case Directory(path=path):
                tree = _directory(state, path, cache, installed, held)
        yield _with_humming(tree, cache, installed, held)


def _revision(state: State, repository: Repository, revision: str, cache: Cache, installed: Installation, held: ExitStack) -> Tree:
    sha = repository.resolve(revision)
    key = _key("revision", repository.content(sha), state.patches, installed)
    tree = _sources(state, key, cache, installed, held, sha=sha, fill=lambda into: repository.export(sha, into))
    if not (dirty := repository.uncommitted()):
        return tree
    return replace(
        tree, notes=(f"{len(dirty)} uncommitted changes in {repository.path} are in no revision: dir:{repository.path} has them",)
    )


def _directory(state: State, path: Path, cache: Cache, installed: Installation, held: ExitStack) -> Tree:
    """A clean checkout is its HEAD, whose tree is found without reading any file."""
    if (path / ".git").exists() and not (repository := Repository.at(path)).uncommitted():
        return _revision(state, repository, "HEAD", cache, installed, held)
    key = _key("directory", _content_of(path), state.patches, installed)
    return _sources(state, key, cache, installed, held, fill=lambda into: _copy(path, into))


def _release(state: State, version: str, cache: Cache, installed: Installation, held: ExitStack) -> Tree:
    if version == installed.version and installed.pristine():
        if not state.patches:
            return Tree(state=state, key=_key("installed", "", (), installed), paths=(), version=version)
        base = installed.root
    else:
        base = held.enter_context(
            cache.tree(f"release-{version}", f"vllm {version}", lambda into: releases.unpack(f"vllm=={version}", into))
        )
        if not state.patches:
            return Tree(state=state, key=f"release-{version}", paths=(base,), version=version, sources=base)
    key = _key("patched", version, state.patches, installed)
    return _sources(state, key, cache, installed, held, fill=lambda into: _copy(base, into, hard=base != installed.root))


def _sources(
    state: State, key: str, cache: Cache, installed: Installation, held: ExitStack, *, fill: Callable[[Path], None], sha: str = ""
) -> Tree:
    """A tree made by ``fill(folder)``, then patched, then completed from the installation."""
    version = f"{installed.version}+tree.{key[-12:]}"

    def build(into: Path) -> None:
        fill(into)
        for patch in state.patches:
            apply_patch(patch, into)
        complete(into, installed, version)

    folder = held.enter_context(cache.tree(key, str(state), build))
    return Tree(state=state, key=key, paths=(folder,), version=version, sha=sha, sources=folder)


def complete(tree: Path, installed: Installation, version: str) -> None:
    """Link what a build of vLLM adds and ``tree`` lacks; write the version file and the metadata."""
    source, target = installed.root / "vllm", tree / "vllm"
    for where, folders, files in os.walk(source):
        here = Path(where).relative_to(source)
        built = here.parts[:1] and here.parts[0] in _BUILT_FOLDERS
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in list(folders):
            if not (target / here / name).exists() and (built or name in _BUILT_FOLDERS):
                (target / here / name).symlink_to(source / here / name)
                folders.remove(name)
        for name in files:
            wanted = built or is_compiled(name) or "_pb2" in name
            if wanted and (target / here).is_dir() and not (target / here / name).exists():
                (target / here / name).symlink_to(source / here / name)
    numbers = tuple(int(part) if part.isdigit() else part for part in re.split(r"[.+]", version))
    (target / "_version.py").unlink(missing_ok=True)
    (target / "_version.py").write_text(
        f"__version__ = version = {version!r}\n__version_tuple__ = version_tuple = {numbers!r}\n__commit_id__ = commit_id = None\n"
    )
    metadata = tree / f"vllm-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(installed.entry_points)


def _with_humming(tree: Tree, cache: Cache, installed: Installation, held: ExitStack) -> Tree:
    """Put the humming-kernels that the state pins beside it, when it is not the installed one."""
    pin = humming_pin(tree.sources or installed.root)
    if pin is None or installed.humming is None or pin == installed.humming:
        return tree
    requirement = f"humming-kernels=={pin}"
    folder = held.enter_context(cache.tree(f"humming-{pin}", requirement, lambda into: releases.unpack_with_needs(requirement, into)))
    note = f"{tree.state.name} runs with {requirement}, which it pins; {installed.humming} is installed"
    return replace(tree, key=f"{tree.key}-humming-{pin}", paths=(*tree.paths, folder), notes=(*tree.notes, note))


def humming_pin(tree: Path) -> str | None:
    """The exact version of humming-kernels that a tree asks for, from its requirements or its wheel's metadata."""
    for stated in (tree / "requirements" / "cuda.txt", *tree.glob("vllm-*.dist-info/METADATA")):
        if stated.is_file() and (pin := _HUMMING.search(stated.read_text())):
            return pin[1]
    return None


def _key(kind: str, content: str, patches: Sequence[Path], installed: Installation) -> str:
    digest = hashlib.sha256()
    texts = [part.encode() for part in (_FORMAT, kind, content, installed.identity)]
    for data in (*texts, *(patch.read_bytes() for patch in patches)):
        digest.update(len(data).to_bytes(8, "little") + data)
    return f"{kind}-{digest.hexdigest()[:24]}"


def _files(root: Path) -> Iterator[Path]:
    for folder in SOURCES:
        for where, folders, names in os.walk(root / folder):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            yield from (Path(where) / name for name in sorted(names))


def _is_linked(file: Path) -> bool:
    """Compiled files, and what vendored packages bring besides Python (half of a wheel's text): too large to copy, never patched."""
    return is_compiled(file.name) or ("third_party" in file.parts and file.suffix != ".py")


def _content_of(root: Path) -> str:
    """Names the sources below ``root`` by their bytes, linked files by size and time."""
    digest = hashlib.sha256()
    for file in _files(root):
        stat = file.stat()
        data = f"{stat.st_size} {stat.st_mtime_ns}".encode() if _is_linked(file) else file.read_bytes()
        digest.update(f"{file.relative_to(root)}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _copy(root: Path, into: Path, *, hard: bool = False) -> None:
    """Copy the sources below ``root``; large files that nobody patches are linked."""
    for file in _files(root):
        target = into / file.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not _is_linked(file):
            shutil.copyfile(file, target)
        elif hard:
            os.link(file, target)
        else:
            target.symlink_to(file.resolve())
