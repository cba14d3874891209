"""Parents, ranges, merges, reverts, shallow and bare clones."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.bisect.repository import Repository
from harness.bisect.tests.repos import Checkout
from harness.bisect.trouble import StateError


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout = Checkout(tmp_path / "checkout")
    for number in range(4):
        checkout.commit(f"number {number}", {"vllm/__init__.py": f"{number}\n"})
    return checkout


def test_parent_and_commit(checkout: Checkout) -> None:
    repository = Repository.at(checkout.path)
    head = repository.resolve("HEAD")
    assert repository.parent(head) == repository.resolve("HEAD~1")
    commit = repository.commit(head)
    assert (commit.subject, commit.author, commit.parents) == ("number 3", "A", (repository.resolve("HEAD~1"),))
    assert repository.touched(head) == ("vllm/__init__.py",)
    root = repository.resolve("HEAD~3")
    with pytest.raises(StateError, match="has no parent: it is the first commit"):
        repository.parent(root)
    assert repository.touched(root) == ("vllm/__init__.py",)


def test_a_shallow_clone_without_the_parent(checkout: Checkout, tmp_path: Path) -> None:
    checkout.git("clone", "--quiet", "--depth=2", f"file://{checkout.path}", str(tmp_path / "shallow"))
    repository = Repository.at(tmp_path / "shallow")
    edge = repository.resolve("HEAD~1")
    with pytest.raises(
        StateError, match=r"is a shallow clone without [0-9a-f]{12}, the parent of [0-9a-f]{12}: run `git fetch --deepen=1`"
    ):
        repository.parent(edge)
    with pytest.raises(StateError, match="the clone is shallow: `git fetch --unshallow` brings the rest"):
        repository.resolve(Repository.at(checkout.path).resolve("HEAD~3"))


def test_a_range_follows_first_parents_through_a_merge(checkout: Checkout) -> None:
    repository = Repository.at(checkout.path)
    good = repository.resolve("HEAD")
    checkout.git("checkout", "--quiet", "-b", "side")
    side = [checkout.commit(f"side {n}", {f"vllm/side{n}.py": ""}) for n in range(2)]
    checkout.git("checkout", "--quiet", "main")
    one = checkout.commit("main goes on", {"vllm/main.py": ""})
    checkout.git("merge", "--quiet", "--no-ff", "--message", "merge side", "side")
    merge = repository.resolve("HEAD")
    assert repository.between(good, merge) == (good, one, merge)
    assert repository.between(good, side[-1]) == (good, *side)
    assert set(repository.touched(merge)) == {"vllm/side0.py", "vllm/side1.py"}
    with pytest.raises(StateError, match=f"is no ancestor of .*: try the commit they share, {good[:12]}"):
        repository.between(one, side[-1])


def test_a_revert_names_what_it_reverts(checkout: Checkout) -> None:
    repository = Repository.at(checkout.path)
    reverted = repository.resolve("HEAD")
    checkout.git("revert", "--no-edit", "HEAD")
    assert repository.commit(repository.resolve("HEAD")).reverts == reverted
    assert repository.commit(reverted).reverts == ""


def test_a_bare_clone_serves(checkout: Checkout, tmp_path: Path) -> None:
    checkout.git("clone", "--quiet", "--bare", str(checkout.path), str(tmp_path / "bare.git"))
    repository = Repository.at(tmp_path / "bare.git")
    (tmp_path / "out").mkdir()
    repository.export(repository.resolve("main~1"), tmp_path / "out")
    assert (tmp_path / "out" / "vllm" / "__init__.py").read_text() == "2\n"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["vllm"]
    assert repository.uncommitted() == ()
