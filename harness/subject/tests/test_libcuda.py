"""The driver stub: built once, shared, and a clear sentence where it cannot be built."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from harness.subject import SubjectUnavailable
from harness.subject.interpreter import libcuda

if TYPE_CHECKING:
    from pathlib import Path


def test_every_function_says_no_device(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(libcuda.build(libcuda.FUNCTIONS, tmp_path)))
    assert {getattr(library, name)() for name in libcuda.FUNCTIONS} == {libcuda.NO_DEVICE}


def test_the_file_is_found_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = libcuda.build(("cuInit",), tmp_path)
    monkeypatch.setattr(libcuda, "compiler", lambda: pytest.fail("compiled again"))
    assert libcuda.build(("cuInit",), tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_builders_at_once_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: libcuda.build(("cuInit",), tmp_path), range(8)))
    assert [path.name for path in tmp_path.iterdir()] == [path.name for path in paths]


def test_the_stub_answers_to_the_drivers_soname(tmp_path: Path) -> None:
    assert libcuda.SONAME.encode() + b"\0" in libcuda.build(libcuda.FUNCTIONS, tmp_path).read_bytes()


def test_without_a_compiler_one_sentence_names_both_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcuda.shutil, "which", lambda _: None)
    monkeypatch.setattr(libcuda.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SubjectUnavailable, match=r"install cc .* or the ziglang package"):
        libcuda.compiler()


def test_ziglang_is_the_second_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcuda.shutil, "which", lambda _: None)
    monkeypatch.setattr(libcuda.importlib.util, "find_spec", lambda name: object() if name == "ziglang" else None)
    assert libcuda.compiler() == [sys.executable, "-m", "ziglang", "cc"]


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcuda, "compiler", lambda: [sys.executable, "-c", "raise SystemExit('no such target')"])
    with pytest.raises(SubjectUnavailable, match="no such target"):
        libcuda.build(("cuInit",), tmp_path)


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "moediff").write_text("a file where the directory should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    libcuda.load_stub(("cuMoediffProbe",))
    assert ctypes.CDLL(None).cuMoediffProbe() == libcuda.NO_DEVICE


def test_a_damaged_file_is_done_without_and_another_machines_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    functions = ("cuMoediffDamaged",)
    (tmp_path / "moediff").mkdir()
    libcuda.path_of(functions, tmp_path / "moediff").write_bytes(b"\x7fELF, and then the disk was full")
    libcuda.load_stub(functions)
    assert ctypes.CDLL(None).cuMoediffDamaged() == libcuda.NO_DEVICE
    here = libcuda.path_of(functions, tmp_path)
    monkeypatch.setattr(libcuda.platform, "machine", lambda: "another")
    assert libcuda.path_of(functions, tmp_path) != here


def test_nowhere_to_load_from_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(f"{path.name}: failed to map segment from shared object")

    monkeypatch.setattr(libcuda, "_load", refuse)
    with pytest.raises(SubjectUnavailable, match=r"failed to map segment .* let XDG_CACHE_HOME or TMPDIR name a directory"):
        libcuda.load_stub(("cuInit",))


def test_an_extension_that_wants_more_gets_more() -> None:
    program = (
        "import sys, types\n"
        "from harness.subject.interpreter import libcuda\n"
        "asked = []\n"
        "def load(functions=libcuda.FUNCTIONS): asked.append(functions)\n"
        "def importing(name):\n"
        "    if len(asked) < 1: raise ImportError(f'{name}.so: undefined symbol: cuNewThing')\n"
        "libcuda.load_stub = load\n"
        "libcuda.importlib.import_module = importing\n"
        "libcuda._extensions = lambda: ('vllm._C',)\n"
        "assert libcuda.import_extensions() == ('vllm._C',)\n"
        "assert asked == [('cuNewThing',)], asked\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
