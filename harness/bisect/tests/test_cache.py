"""The bounded folder: least recently used first, never what is held, never half-built."""

from __future__ import annotations

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.bisect.cache import Cache, default_root
from harness.bisect.trouble import StateError

KIB = 1024


def build(into: Path) -> None:
    (into / "file").write_bytes(os.urandom(100 * KIB))


def use(cache: Cache, key: str) -> None:
    with cache.tree(key, f"tree {key}", build) as folder:
        assert (folder / "file").is_file()
    os.utime(cache.root / key / "about.json", (use.clock, use.clock)) if (cache.root / key).exists() else None  # type: ignore[attr-defined]
    use.clock += 1  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def clock() -> None:
    use.clock = 1000.0  # type: ignore[attr-defined]


def test_a_tree_is_built_once(tmp_path: Path) -> None:
    built = []
    for _ in range(2):
        with Cache(tmp_path).tree("k", "what", lambda into: built.append(into)):
            pass
    assert len(built) == 1
    (entry,) = Cache(tmp_path).entries()
    assert (entry.key, entry.what) == ("k", "what")


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for key in ("a", "b", "c", "a"):
        use(cache, key)
    bounded = Cache(tmp_path, limit=250 * KIB)
    assert [entry.key for entry in bounded.evict(bounded.limit)] == ["b"]
    use(bounded, "d")
    assert {entry.key for entry in cache.entries()} == {"a", "d"}
    assert sum(entry.size for entry in cache.entries()) <= bounded.limit


def test_old_trees_go_by_age(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    use(cache, "old")
    with cache.tree("new", "", build):
        pass
    assert [entry.key for entry in cache.evict(cache.limit, older_than=3600)] == ["old"]


def test_what_is_held_is_not_evicted(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=0)
    with cache.tree("held", "", build) as folder, cache.tree("held", "", build):
        assert cache.evict(0) == []
        assert folder.is_dir()
    assert cache.entries() == []


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fails(into: Path) -> None:
        build(into)
        raise ValueError("half-way")

    cache = Cache(tmp_path)
    with pytest.raises(ValueError, match="half-way"), cache.tree("k", "", fails):
        pass
    assert cache.entries() == []
    (tmp_path / "k.part" / "tree").mkdir(parents=True)  # as a killed process leaves it
    use(cache, "k")
    assert [path.name for path in tmp_path.glob("k*")] == ["k"]


def test_two_processes_build_a_tree_once(tmp_path: Path) -> None:
    built = []

    def slow(into: Path) -> None:
        built.append(into)
        time.sleep(0.2)
        build(into)

    def take() -> None:
        with Cache(tmp_path).tree("k", "", slow) as folder:
            assert (folder / "file").is_file()

    threads = [threading.Thread(target=take) for _ in range(4)]  # locks are per open file, so threads stand for processes
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOSPC, "has no room for another tree: `moediff cache --clear` empties it, MOEDIFF_CACHE names another folder"),
        (errno.EROFS, r"cannot be used \(Read-only file system\): name a folder that can be written to with MOEDIFF_CACHE"),
    ],
)
def test_a_folder_that_takes_no_tree(number: int, sentence: str, tmp_path: Path) -> None:
    def fails(into: Path) -> None:
        build(into)
        raise OSError(number, os.strerror(number))

    with pytest.raises(StateError, match=sentence), Cache(tmp_path).tree("k", "", fails):
        pass
    assert Cache(tmp_path).entries() == []


def test_the_root_does_not_depend_on_where_a_worker_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEDIFF_CACHE", "here")
    assert default_root() == Path.cwd() / "here"
    monkeypatch.delenv("MOEDIFF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "there")
    assert default_root() == Path.cwd() / "there" / "moediff"


def test_a_root_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="cannot be used"), Cache(tmp_path / "file" / "cache").tree("k", "", build):
        pass


def test_a_tree_makes_room_as_soon_as_it_is_built(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=150 * KIB)
    use(cache, "old")
    with cache.tree("new", "", build):
        assert [entry.key for entry in cache.entries()] == ["new"]


def test_processes_that_build_and_evict_at_once(tmp_path: Path) -> None:
    cache, failed = Cache(tmp_path, limit=150 * KIB), []

    def take(number: int) -> None:
        for turn in range(20):
            with cache.tree(f"k{(number + turn) % 3}", "", build) as folder:
                if not (folder / "file").is_file():
                    failed.append((number, turn))
            cache.entries()

    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(take, number) for number in range(4)]:
            job.result()
    assert failed == []
