"""Reading a vLLM checkout without touching it.

Only commands that write nothing into the repository are used: no registered worktree, no index refresh, no fetch, no hook.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from harness.bisect.trouble import StateError, StateUnavailable

SOURCES = ("vllm", "requirements")  # what a tree is made of
_FORMAT = "%P%x00%an%x00%aI%x00%s%x00%b"


def git(
    *arguments: str, where: Path, check: bool = True, stdin: bytes | None = None, environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[bytes]:
    """Run git deaf to the variables that a surrounding git (a hook, a bisect) sets, and without optional locks."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    clean |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", **environment}
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(where), *arguments]
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, env=clean, check=False)
    except FileNotFoundError as error:
        raise StateError("git is not installed: a revision cannot be read") from error
    if check and done.returncode:
        raise StateError(f"`git {' '.join(arguments)}` in {where} failed: {last_line(done.stderr)}")
    return done


def last_line(output: bytes) -> str:
    """The last non-empty line of a program's output, or a placeholder."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What a report says of a commit."""

    sha: str
    parents: tuple[str, ...]
    author: str
    date: str  # ISO 8601
    subject: str
    body: str

    @property
    def reverts(self) -> str:
        """The commit that ``git revert`` noted in the message, or ''."""
        _, marker, rest = self.body.partition("This reverts commit ")
        return rest.split(".")[0].split()[0].rstrip(",") if marker else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A checkout (or bare clone) at ``path``."""

    path: Path

    @classmethod
    def at(cls, path: Path) -> Repository:
        """Raises StateError: no folder, or no repository there."""
        if not path.is_dir():
            raise StateError(f"there is no folder {path}: name a vLLM checkout with --repo")
        if git("rev-parse", "--git-dir", where=path, check=False).returncode:
            raise StateError(f"{path} is no git repository: name a vLLM checkout with --repo")
        return cls(path=path.resolve())

    def _text(self, *arguments: str) -> str:
        return git(*arguments, where=self.path).stdout.decode(errors="replace").strip()

    def resolve(self, revision: str) -> str:
        """The full name of a commit. Raises StateError when it is not here."""
        done = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}", where=self.path, check=False)
        if done.returncode:
            hint = "the clone is shallow: `git fetch --unshallow` brings the rest" if self.shallow else "`git fetch` may bring it"
            raise StateError(f"there is no revision '{revision}' in {self.path}: check its spelling ({hint})")
        return done.stdout.decode().strip()

    @property
    def shallow(self) -> bool:
        """True when history was cut off while cloning."""
        return self._text("rev-parse", "--is-shallow-repository") == "true"

    def parent(self, sha: str) -> str:
        """The first parent. Raises StateError: a root commit, or the parent was cut off by a shallow clone."""
        header = self._text("cat-file", "commit", sha).split("\n\n", 1)[0]
        parents = [line.split()[1] for line in header.splitlines() if line.startswith("parent ")]
        if not parents:
            raise StateError(f"{sha[:12]} has no parent: it is the first commit of {self.path}")
        if git("cat-file", "-e", f"{parents[0]}^{{commit}}", where=self.path, check=False).returncode:
            raise StateError(
                f"{self.path} is a shallow clone without {parents[0][:12]}, the parent of {sha[:12]}: run `git fetch --deepen=1` there"
            )
        return parents[0]

    def commit(self, sha: str) -> Commit:
        """Author, date and message of a commit."""
        parents, author, date, subject, body = self._text("log", "-1", "--no-show-signature", f"--format={_FORMAT}", sha).split("\0")
        return Commit(sha=sha, parents=tuple(parents.split()), author=author, date=date, subject=subject, body=body)

    def between(self, good: str, bad: str) -> tuple[str, ...]:
        """``good``, then the first-parent line to ``bad``, oldest first. Raises StateError when ``good`` does not lead to ``bad``."""
        if git("merge-base", "--is-ancestor", good, bad, where=self.path, check=False).returncode:
            base = self.merge_base(good, bad)
            hint = f"try the commit they share, {base[:12]}" if base else "they share no history here"
            if not base and self.shallow:
                hint = "the clone is shallow: run `git fetch --unshallow` there"
            raise StateError(f"{good[:12]}, given as good, is no ancestor of {bad[:12]}, given as bad: {hint}")
        return (good, *self._text("rev-list", "--first-parent", "--reverse", f"{good}..{bad}").split())

    def merge_base(self, one: str, other: str) -> str | None:
        """The best commit two share, or None."""
        bases = git("merge-base", one, other, where=self.path, check=False).stdout.decode().split()
        return bases[0] if bases else None

    def touched(self, sha: str) -> tuple[str, ...]:
        """Paths a commit changes against its first parent."""
        return tuple(self._text("log", "-1", "-m", "--first-parent", "--name-only", "--format=", sha).splitlines())

    def uncommitted(self) -> tuple[str, ...]:
        """Changed or new files of the sources, as ``git status`` prints them; none in a bare repository."""
        if self._text("rev-parse", "--is-bare-repository") == "true":
            return ()
        return tuple(self._text("status", "--porcelain", "--", *SOURCES).splitlines())

    def content(self, sha: str) -> str:
        """Names the content of the sources: equal for two commits exactly when their sources are equal."""
        done = git("ls-tree", sha, "--", *SOURCES, where=self.path)
        if b"\tvllm\n" not in done.stdout:
            raise StateUnavailable(f"{sha[:12]} holds no folder vllm: is {self.path} a vLLM checkout?")
        return done.stdout.decode()

    def export(self, sha: str, into: Path) -> None:
        """Write the sources of a commit below ``into``, through an index of its own that lies there and is removed."""
        index = into / ".index"
        index_of_its_own = {"GIT_INDEX_FILE": str(index)}
        top = self._text("rev-parse", "--absolute-git-dir")
        options = (f"--git-dir={top}", f"--work-tree={into}")
        listed = git("ls-tree", "-r", "-z", "--name-only", sha, "--", *SOURCES, where=self.path)
        git(*options, "read-tree", sha, where=into, environment=index_of_its_own)
        git(*options, "checkout-index", "-z", "--stdin", where=into, stdin=listed.stdout, environment=index_of_its_own)
        index.unlink()


def apply_patch(patch: Path, root: Path) -> None:
    """Apply the part of ``patch`` that lies in the sources to the files below ``root``, which is no repository.

    Raises:
        StateError: it is no patch.
        StateUnavailable: it touches none of the sources, or does not apply; the first refused hunk is quoted.
    """
    include = [f"--include={folder}/*" for folder in SOURCES]
    outside = {"GIT_CEILING_DIRECTORIES": str(root.resolve().parent)}  # else a repository around the cache makes git skip every file
    touched = git("apply", "--numstat", *include, str(patch.resolve()), where=root, check=False, environment=outside)
    if touched.returncode:
        raise StateError(f"{patch} is no patch that git reads: {last_line(touched.stderr)}")
    if not touched.stdout.strip():
        raise StateUnavailable(f"{patch} changes no file below vllm/: there is nothing to try")
    done = git("apply", "--whitespace=nowarn", *include, str(patch.resolve()), where=root, check=False, environment=outside)
    if done.returncode:
        first = done.stderr.decode(errors="replace").strip().splitlines()[0].removeprefix("error: ")
        raise StateUnavailable(f"{patch} does not apply: {first}")
