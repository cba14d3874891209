"""Trees from revisions, folders, releases and patches; and what must never happen to the user's checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.bisect import releases, trees
from harness.bisect.cache import Cache
from harness.bisect.installation import Installation
from harness.bisect.spec import parse
from harness.bisect.tests.repos import Checkout, fake_installation, fingerprint
from harness.bisect.trees import Tree, planted
from harness.bisect.trouble import Exit, StateError, StateUnavailable

INIT = "from vllm._version import __version__\nfrom vllm.state import STATE\n"
PATCH = """\
diff --git a/docs/readme.md b/docs/readme.md
--- a/docs/readme.md
+++ b/docs/readme.md
@@ -1 +1 @@
-not in any tree
+still not
diff --git a/vllm/state.py b/vllm/state.py
--- a/vllm/state.py
+++ b/vllm/state.py
@@ -1 +1 @@
-STATE = 'second'
+STATE = 'patched'
"""


@pytest.fixture
def installed(tmp_path: Path) -> Installation:
    return fake_installation(tmp_path / "site-packages")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout = Checkout(tmp_path / "checkout")
    checkout.commit("first", {"vllm/__init__.py": INIT, "vllm/state.py": "STATE = 'first'\n", "vllm/inner/__init__.py": "", "README": "1"})
    checkout.commit("second", {"vllm/state.py": "STATE = 'second'\n"})
    checkout.commit("only words", {"README": "2"})
    return checkout


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def plant(text: str, cache: Cache, installed: Installation, repository: Path | None = None) -> Tree:
    with planted(parse(text, repository), cache, installed) as tree:
        return tree


def imported(tree: Tree, code: str = "import vllm; print(vllm.STATE, vllm.__version__)") -> str:
    path = os.pathsep.join(map(str, tree.paths))
    done = subprocess.run([sys.executable, "-P", "-S", "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_revision_runs_over_the_installed_extensions(checkout: Checkout, cache: Cache, installed: Installation) -> None:
    tree = plant("HEAD~2", cache, installed, checkout.path)
    assert imported(tree) == f"first {tree.version}"
    assert tree.version.startswith("0.33.0+tree.")
    assert imported(tree, "from importlib.metadata import version; print(version('vllm'))") == tree.version
    assert imported(tree, "import vllm.vllm_flash_attn as f, vllm.third_party.vendored as v; print(f.FLASH, v.VENDORED)") == "built True"
    names = sorted(str(path.relative_to(tree.paths[0])) for path in tree.paths[0].rglob("*.so"))
    assert names == ["vllm/_C.abi3.so", "vllm/inner/_D.abi3.so"]
    assert not (tree.paths[0] / "README").exists()


def test_what_a_revision_lacks_is_not_lent_by_the_installation(checkout: Checkout, cache: Cache, installed: Installation) -> None:
    tree = plant("HEAD", cache, installed, checkout.path)
    assert not (tree.paths[0] / "vllm" / "new_module.py").exists()
    assert not (tree.paths[0] / "vllm" / "newer_folder").exists()


def test_revisions_with_equal_sources_share_a_tree(checkout: Checkout, cache: Cache, installed: Installation) -> None:
    assert plant("HEAD", cache, installed, checkout.path).key == plant("HEAD~1", cache, installed, checkout.path).key
    assert plant("HEAD~2", cache, installed, checkout.path).key != plant("HEAD", cache, installed, checkout.path).key
    assert len(cache.entries()) == 2


def test_the_checkout_is_never_touched(checkout: Checkout, cache: Cache, installed: Installation, tmp_path: Path) -> None:
    checkout.write({"vllm/state.py": "STATE = 'stashed'\n"})
    checkout.git("stash")
    checkout.git("bisect", "start", "HEAD", "HEAD~2")
    checkout.write({"vllm/state.py": "STATE = 'staged'\n", "vllm/extra.py": ""})
    checkout.git("add", "vllm/state.py")
    checkout.write({"vllm/state.py": "STATE = 'unstaged'\n"})
    os.utime(checkout.path / "README")  # makes `git status` want to refresh the index
    patch = tmp_path / "fix.patch"
    patch.write_text(PATCH)
    before = fingerprint(checkout.path)
    for state in ("HEAD", "main~2", f"main+{patch}", f"dir:{checkout.path}"):
        plant(state, cache, installed, checkout.path)
    with pytest.raises(StateError):
        plant("missing", cache, installed, checkout.path)
    assert fingerprint(checkout.path) == before


def test_a_surrounding_git_does_not_leak_in(
    checkout: Checkout, cache: Cache, installed: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "some-index"))
    assert imported(plant("HEAD", cache, installed, checkout.path)).startswith("second ")


def test_uncommitted_changes_are_said_to_be_left_out(checkout: Checkout, cache: Cache, installed: Installation) -> None:
    assert plant("HEAD", cache, installed, checkout.path).notes == ()
    checkout.write({"vllm/state.py": "STATE = 'dirty'\n", "vllm/untracked.py": ""})
    (note,) = plant("HEAD", cache, installed, checkout.path).notes
    assert note == f"2 uncommitted changes in {checkout.path} are in no revision: dir:{checkout.path} has them"


def test_a_folder_is_taken_as_it_lies(checkout: Checkout, cache: Cache, installed: Installation) -> None:
    clean = plant(str(checkout.path), cache, installed)
    assert clean.key == plant("HEAD", cache, installed, checkout.path).key
    checkout.write({"vllm/state.py": "STATE = 'dirty'\n"})
    dirty = plant(f"D=dir:{checkout.path}", cache, installed)
    assert imported(dirty) == f"dirty {dirty.version}"
    checkout.write({"vllm/state.py": "STATE = 'dirtier'\n"})
    assert plant(f"D=dir:{checkout.path}", cache, installed).key != dirty.key


def test_a_patch_is_applied_even_inside_another_repository(checkout: Checkout, installed: Installation, tmp_path: Path) -> None:
    patch = tmp_path / "fix.patch"
    patch.write_text(PATCH)
    around = Checkout(tmp_path / "around")
    tree = plant(f"P=HEAD+{patch}", Cache(around.path / "cache"), installed, checkout.path)
    assert imported(tree).startswith("patched ")


@pytest.mark.parametrize(
    ("text", "code", "sentence"),
    [
        (PATCH.replace("'second'", "'other'"), Exit.CANNOT_TELL, "{patch} does not apply: patch failed: vllm/state.py:1"),
        (PATCH.split("diff --git a/vllm")[0], Exit.CANNOT_TELL, "{patch} changes no file below vllm/: there is nothing to try"),
        (
            "no patch at all\n",
            Exit.MISUSE,
            '{patch} is no patch that git reads: error: No valid patches in input (allow with "--allow-empty")',
        ),
    ],
)
def test_a_patch_that_does_not_apply(
    text: str, code: Exit, sentence: str, checkout: Checkout, cache: Cache, installed: Installation, tmp_path: Path
) -> None:
    patch = tmp_path / "fix.patch"
    patch.write_text(text)
    with pytest.raises(StateError) as caught:
        plant(f"P=HEAD+{patch}", cache, installed, checkout.path)
    assert str(caught.value) == sentence.format(patch=patch)
    assert caught.value.exit == code
    assert cache.entries() == []


def test_revisions_that_are_not_there(checkout: Checkout, cache: Cache, installed: Installation, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"there is no revision 'nope' in .*checkout: check its spelling \(`git fetch` may bring it\)"):
        plant("nope", cache, installed, checkout.path)
    with pytest.raises(StateError, match=r"there is no folder .*absent: name a vLLM checkout with --repo"):
        plant("HEAD", cache, installed, tmp_path / "absent")
    (tmp_path / "plain").mkdir()
    with pytest.raises(StateError, match="plain is no git repository: name a vLLM checkout with --repo"):
        plant("HEAD", cache, installed, tmp_path / "plain")
    other = Checkout(tmp_path / "other")
    other.commit("not vllm", {"file": ""})
    with pytest.raises(StateUnavailable, match=r"holds no folder vllm: is .*other a vLLM checkout"):
        plant("HEAD", cache, installed, other.path)


def test_a_release_is_its_wheel_and_the_humming_it_pins(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def unpack(requirement: str, into: Path) -> None:
        asked.append(requirement)
        name, _, version = requirement.partition("==")
        if name == "vllm":
            fake_installation(into, version)
            (into / "vllm" / "state.py").write_text(f"STATE = 'wheel {version}'\n")
            (into / f"vllm-{version}.dist-info").mkdir()
            (into / f"vllm-{version}.dist-info" / "METADATA").write_text("Name: vllm\nRequires-Dist: humming-kernels[cu13]==0.1.12\n")
        else:
            (into / "humming.py").write_text(f"VERSION = '{version}'\n")

    monkeypatch.setattr(releases, "unpack", unpack)
    installed = fake_installation(tmp_path / "site-packages", humming="0.1.19")
    tree = plant("old=release:0.30.0", cache, installed)
    assert imported(tree, "import vllm, humming; print(vllm.STATE, vllm.__version__, humming.VERSION)") == "wheel 0.30.0 0.30.0 0.1.12"
    assert tree.notes == ("old runs with humming-kernels==0.1.12, which it pins; 0.1.19 is installed",)
    plant("again=release:0.30.0", cache, installed)
    assert asked == ["vllm==0.30.0", "humming-kernels==0.1.12"]

    patch = tmp_path / "fix.patch"
    patch.write_text(PATCH.replace("'second'", "'wheel 0.30.0'"))
    patched = plant(f"P=release:0.30.0+{patch}", cache, installed)
    assert imported(patched).startswith("patched ")
    assert imported(tree).startswith("wheel ")


def test_the_installed_release_too_runs_with_the_humming_it_pins(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = fake_installation(tmp_path / "site-packages", humming="0.1.11")
    info = installed.root / "vllm-0.33.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("")
    (info / "METADATA").write_text("Requires-Dist: humming-kernels[cu13]==0.1.19\n")
    monkeypatch.setattr(releases, "unpack", lambda requirement, into: (into / "humming.py").write_text(f"ASKED = '{requirement}'\n"))
    tree = plant("now=release:0.33.0", cache, installed)
    assert [(path / "humming.py").read_text() for path in tree.paths] == ["ASKED = 'humming-kernels==0.1.19'\n"]
    assert tree.sources is None
    assert tree.notes == ("now runs with humming-kernels==0.1.19, which it pins; 0.1.11 is installed",)


def test_the_installed_release_stands_for_itself_while_unchanged(
    cache: Cache, installed: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []
    monkeypatch.setattr(releases, "unpack", lambda requirement, into: fetched.append(requirement))
    info = installed.root / "vllm-0.33.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("vllm/new_module.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\nvllm/_C.abi3.so,,\n")
    tree = plant("release:0.33.0", cache, installed)
    assert (tree.paths, tree.version, fetched) == ((), "0.33.0", [])
    (installed.root / "vllm" / "new_module.py").write_text("changed by hand")
    assert plant("release:0.33.0", cache, installed).paths
    assert fetched == ["vllm==0.33.0"]


def test_what_a_pinned_humming_needs_and_is_not_installed_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def unpack(requirement: str, into: Path) -> None:
        asked.append(requirement)
        if requirement.startswith("humming"):
            (into / "humming_kernels-0.1.10.dist-info").mkdir()
            needs = ("pytest>=2", "no-such-package<3,>=2", "only-on-cuda; extra == 'cu12'", "only-elsewhere; sys_platform == 'nowhere'")
            (into / "humming_kernels-0.1.10.dist-info" / "METADATA").write_text("".join(f"Requires-Dist: {need}\n" for need in needs))

    monkeypatch.setattr(releases, "unpack", unpack)
    releases.unpack_with_needs("humming-kernels==0.1.10", tmp_path)
    assert asked == ["humming-kernels==0.1.10", "no-such-package<3,>=2"]


@pytest.mark.parametrize(
    ("text", "pin"),
    [
        ("numba\n# Humming\nhumming-kernels[cu13]==0.1.14\n", "0.1.14"),
        ("humming-kernels == 0.1.9.post1  # pinned\n", "0.1.9.post1"),
        ("# humming-kernels==0.1.14\n", None),
        ("humming-kernels>=0.1\n", None),
    ],
)
def test_the_humming_pin_is_read_from_the_requirements(text: str, pin: str | None, tmp_path: Path) -> None:
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "cuda.txt").write_text(text)
    assert trees.humming_pin(tmp_path) == pin


def test_no_installation_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not (Path(entry) / "vllm").exists()])
    with pytest.raises(
        StateError, match="no vLLM with compiled extensions is installed here, and every state borrows them: `pip install vllm`"
    ):
        Installation.find()
