"""A bounded folder of trees, each under a key that names its content; the least recently used go first.

Layout: ``ROOT/KEY/tree`` beside ``ROOT/KEY/about.json``. A tree is built under another name and renamed, so a half-built one is never
used. Every process that holds a tree keeps a shared lock on its ``about.json``; eviction passes over what is held.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harness.bisect.trouble import StateError

GIB = 1 << 30
DEFAULT_LIMIT = 12 * GIB  # bytes; a release is about 1 GiB, a revision about 60 MiB


def default_root() -> Path:
    """``MOEDIFF_CACHE``, else ``moediff`` in the user's cache folder."""
    if chosen := os.environ.get("MOEDIFF_CACHE"):
        return Path(chosen).absolute()  # workers run in another folder
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "moediff"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tree in the cache."""

    key: str
    what: str  # what it was built from, in words
    size: int  # bytes on disk
    used: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class Cache:
    """Trees below ``root``, together at most ``limit`` bytes after each build (more only while more are held at once)."""

    root: Path
    limit: int = DEFAULT_LIMIT

    @contextmanager
    def tree(self, key: str, what: str, build: Callable[[Path], None]) -> Iterator[Path]:
        """The tree of ``key``, built by ``build(folder)`` when it is not there; held until the block ends.

        Raises:
            StateError: the cache cannot be written to, or the disk is full.
        """
        try:
            held = self._hold(key, what, build)
        except OSError as error:
            raise StateError(self._sentence(error)) from error
        with held:
            yield self.root / key / "tree"
        self.evict(self.limit)

    def _hold(self, key: str, what: str, build: Callable[[Path], None]) -> IO[bytes]:
        place = self.root / key
        with self._locked(f"{key}.lock", fcntl.LOCK_EX):
            if built := not place.is_dir():
                self._build(place, what, build)
            held = (place / "about.json").open("rb")
            fcntl.flock(held, fcntl.LOCK_SH)
        os.utime(place / "about.json")
        if built:
            self.evict(self.limit)
        return held

    def _sentence(self, error: OSError) -> str:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{self.root} has no room for another tree: `moediff cache --clear` empties it, MOEDIFF_CACHE names another folder"
        return f"the cache {self.root} cannot be used ({error.strerror or error}): name a folder that can be written to with MOEDIFF_CACHE"

    def _build(self, place: Path, what: str, build: Callable[[Path], None]) -> None:
        part = self.root / f"{place.name}.part"
        shutil.rmtree(part, ignore_errors=True)  # left by a killed process: the lock is ours now
        try:
            (part / "tree").mkdir(parents=True)
            build(part / "tree")
            (part / "about.json").write_text(json.dumps({"what": what, "size": _size(part)}))
            part.rename(place)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def entries(self) -> list[Entry]:
        """What is there, the least recently used first."""
        found = []
        for about in self.root.glob("*/about.json"):
            if about.parent.suffix == ".part":
                continue
            with suppress(FileNotFoundError):  # another process has just removed it
                said = json.loads(about.read_text())
                found.append(Entry(key=about.parent.name, what=said["what"], size=said["size"], used=about.stat().st_mtime))
        return sorted(found, key=lambda entry: (entry.used, entry.key))

    def evict(self, limit: int, older_than: float = 0.0) -> list[Entry]:
        """Remove the least recently used trees until ``limit`` bytes are left, and those unused for ``older_than`` seconds (0: none)."""
        entries, removed = self.entries(), []
        total, now = sum(entry.size for entry in entries), time.time()
        for entry in entries:
            if (total > limit or (older_than and now - entry.used > older_than)) and self._remove(entry):
                total -= entry.size
                removed.append(entry)
        return removed

    def _remove(self, entry: Entry) -> bool:
        """False when some process holds it, or has just removed it."""
        with self._locked(f"{entry.key}.lock", fcntl.LOCK_EX | fcntl.LOCK_NB) as mine:
            if not mine or not (self.root / entry.key / "about.json").is_file():
                return False
            with (self.root / entry.key / "about.json").open("rb") as about:
                try:
                    fcntl.flock(about, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                doomed = self.root / f"{entry.key}.part"
                (self.root / entry.key).rename(doomed)
            shutil.rmtree(doomed)
        return True

    @contextmanager
    def _locked(self, name: str, how: int) -> Iterator[bool]:
        locks = self.root / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / name).open("wb") as lock:
            try:
                fcntl.flock(lock, how)
            except BlockingIOError:
                yield False
            else:
                yield True


def _size(folder: Path) -> int:
    """Bytes on disk below ``folder``; links are not followed."""
    return sum((Path(where) / name).lstat().st_blocks * 512 for where, _, names in os.walk(folder) for name in names)
