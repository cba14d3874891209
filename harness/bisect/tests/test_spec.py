"""Names of states."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.bisect.spec import Directory, Release, Revision, State, parse
from harness.bisect.trouble import Exit, StateError


def test_the_four_kinds(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    patch = tmp_path / "a.patch"
    patch.touch()
    assert parse("release:0.33.0", None) == State(name="release:0.33.0", base=Release(version="0.33.0"))
    assert parse(f"D={tmp_path}", None) == parse(f"D=dir:{tmp_path}", None) == State(name="D", base=Directory(path=tmp_path))
    assert parse("M=main", tmp_path) == State(name="M", base=Revision(repository=tmp_path, revision="main"))
    patched = parse(f"PA=pr-1+{patch}+{patch}", tmp_path)
    assert patched.patches == (patch, patch)
    assert str(patched) == f"pr-1+{patch}+{patch}"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("A=main", "state 'A': 'main' is taken for a revision, and no checkout was named: add --repo PATH"),
        ("A=release:latest", "state 'A': 'latest' is no release; write release:0.33.0"),
        ("A=dir:/nowhere", "state 'A': /nowhere holds no vllm/__init__.py: name the root of a vLLM checkout"),
        ("A=main+no.patch", "state 'A': there is no patch file no.patch"),
        ("A=", "state 'A' is empty: write a revision, release:X.Y.Z or dir:PATH"),
        ("a b=main", "'a b' in 'a b=main' is no name for a state: use letters, digits, '_', '.' and '-'"),
    ],
)
def test_what_is_wrong_is_said(text: str, sentence: str) -> None:
    with pytest.raises(StateError) as caught:
        parse(text, None)
    assert str(caught.value) == sentence
    assert caught.value.exit == Exit.MISUSE
