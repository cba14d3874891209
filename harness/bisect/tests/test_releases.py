"""Wheels by name; and, on real releases, where Humming began to convert online MXFP8 (vllm#56606)."""

from __future__ import annotations

import shutil
import stat
import sys
from pathlib import Path

import pytest

from harness.bisect import releases
from harness.bisect.trouble import Exit, StateError, StateUnavailable
from harness.cli import main

SCRIPT = Path(__file__).parent / "data" / "online_mxfp8_humming.py"


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that alone is PATH; what is written to ``uv`` or ``pip`` there is the client."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    program(folder / "python", "exit 1")  # no pip module
    return folder


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_wheel_is_unpacked_by_name_and_without_dependencies(client: Path, tmp_path: Path) -> None:
    program(client / "uv", f"echo $@ > {tmp_path}/asked")
    releases.unpack("vllm==0.30.0", tmp_path / "into")
    asked = (tmp_path / "asked").read_text().split()
    assert asked[:2] == ["pip", "install"]
    assert {"--no-deps", "--only-binary", "--target", "vllm==0.30.0"} <= set(asked)


def test_a_wheel_that_is_not_there(client: Path, tmp_path: Path) -> None:
    program(client / "pip", "echo 'WARNING: old pip' >&2; echo 'ERROR: No matching distribution found for vllm==9.9.9' >&2; exit 1")
    with pytest.raises(StateUnavailable) as caught:
        releases.unpack("vllm==9.9.9", tmp_path / "into")
    assert str(caught.value) == "the wheel of vllm==9.9.9 could not be had: ERROR: No matching distribution found for vllm==9.9.9"


def test_no_client_at_all(client: Path, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="neither uv nor pip is installed, so no release can be fetched: install one of them"):
        releases.unpack("vllm==0.30.0", tmp_path / "into")


def test_releases_between_two(client: Path) -> None:
    program(client / "pip", "echo 'vllm (0.33.0)'; echo 'Available versions: 0.33.0, 0.30.0, 0.9.2, 0.29.0, 0.10.1.1'")
    assert releases.between("0.9.2", "0.30.0") == ("0.9.2", "0.10.1.1", "0.29.0", "0.30.0")
    with pytest.raises(StateError, match=r"the registry lists no release 0\.31\.0 of vllm; name the releases to search with --releases"):
        releases.between("0.29.0", "0.31.0")
    program(client / "pip", "echo 'ERROR: no network' >&2; exit 1")
    with pytest.raises(StateError, match="could not be listed: ERROR: no network; name them with --releases A,B,C"):
        releases.between("0.29.0", "0.30.0")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_release_that_mended_online_mxfp8_with_humming(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEDIFF_CACHE", str(tmp_path / "cache"))
    assert shutil.which("uv") or shutil.which("pip")
    span = ["--good", "release:0.30.0", "--bad", "release:0.33.0", "--regress-on", "fixed", "--backend", "interpreter"]
    assert main(["bisect", *span, "--script", str(SCRIPT)]) == Exit.GOOD
    page = capsys.readouterr().out
    assert page.startswith("## RUN_ERROR KeyError: 'weight_scale' until 0.31.0, mended in 0.32.0\n"), page
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:4]] for line in page.splitlines() if line.startswith("| 0.")
    }
    assert rows["0.31.0"] == ["fails", f"{SCRIPT.name}: RUN_ERROR KeyError: 'weight_scale'"]
    assert rows["0.30.0"] == rows["0.31.0"]
    assert rows["0.32.0"] == ["passes", f"{SCRIPT.name}: PASS"]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_release_that_mended_one_weight_scale_an_expert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """INT8 weights alone, per tensor: up to 0.32.0 every expert is scaled by expert 0's scale, because a [E] scale was given no stride."""
    monkeypatch.setenv("MOEDIFF_CACHE", str(tmp_path / "cache"))
    span = ["--good", "release:0.32.0", "--bad", "release:0.33.0", "--regress-on", "fixed", "--backend", "interpreter"]
    assert main(["bisect", *span, "int8-tensor-none-raw-gelu_no_mul-fp16-e4k1m17h64i32-balanced-norenorm-onin"]) == Exit.GOOD
    page = capsys.readouterr().out
    assert page.splitlines()[0].endswith(" until 0.32.0, mended in 0.33.0"), page
    assert "every token is bad except those of expert 0" in page
