"""compare, bisect, probe and cache as typed, and under a real ``git bisect run``, over a fake vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import preflight
from harness.bisect import commands, releases, states
from harness.bisect.cache import Cache
from harness.bisect.installation import Installation
from harness.bisect.states import Plan, StateRun
from harness.bisect.tests.repos import HERMETIC, Checkout, fake_installation, fingerprint
from harness.bisect.trees import Tree
from harness.bisect.trouble import Exit, StateUnavailable
from harness.cli import main
from harness.exits import Misuse

CASE = "int8-channel-static-quark-silu-fp16-e4k2m8h128i64-balanced"
PAIR = f"{CASE}[fused_experts]"
ONE = [CASE, "--entry", "fused_experts", "--backend", "interpreter"]
ROOT = Path(__file__).parents[3]
FAULT = "W_SCALE_FLAT_INDEX"


def sources(state: str) -> dict[str, str | None]:
    return {"vllm/__init__.py": f"from vllm._version import __version__\nSTATE = {state!r}\n"}


@pytest.fixture(autouse=True)
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installation:
    installed = fake_installation(tmp_path / "site-packages")
    monkeypatch.setattr(states, "WORKER", "harness.bisect.tests.fake_worker")
    monkeypatch.setattr(Installation, "find", lambda: installed)
    monkeypatch.setattr(preflight, "check", lambda backend, subject: None)
    monkeypatch.setenv("MOEDIFF_CACHE", str(tmp_path / "cache"))
    return installed


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """0 honest, 1 words, 2 does not import, 3 another fault, 4 repaired, 5 words, 6 THE fault, 7 words, 8 fault still there."""
    made = Checkout(tmp_path / "checkout")
    made.commit("0 start", sources("honest"))
    made.commit("1 words", {"README": "1"})
    made.commit("2 broken", sources("honest") | {"vllm/__init__.py": "import nothing_of_the_kind\n"})
    made.commit("3 other fault", sources("ZERO_OUTPUT"))
    made.commit("4 repaired", sources("honest"))
    made.commit("5 words", {"README": "5"})
    made.commit("6 culprit", sources(FAULT) | {"csrc/kernel.cu": ""})
    made.commit("7 words", {"README": "7"})
    made.commit("8 end", sources(FAULT) | {"vllm/other.py": ""})
    return made


def test_bisect_names_the_culprit_and_writes_a_page(checkout: Checkout, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = fingerprint(checkout.path)
    assert main(["bisect", "--good", "HEAD~8", "--bad", "HEAD", "--repo", str(checkout.path), *ONE]) == Exit.GOOD
    printed = capsys.readouterr()
    culprit = checkout.git("rev-parse", "HEAD~2")
    assert printed.out.startswith(f"## MISMATCH {FAULT}@")
    assert f"since {culprit[:12]} (6 culprit)" in printed.out
    assert f"- first bad: {culprit} 6 culprit (A, " in printed.out
    assert "files: csrc/kernel.cu, vllm/__init__.py" in printed.out
    assert "1 of them are compiled or steer the build, and ran as the installed release has them" in printed.out
    assert f"**`{PAIR}`**" in printed.out
    ends = f"--good {checkout.git('rev-parse', 'HEAD~8')} --bad {checkout.git('rev-parse', 'HEAD')}"
    assert f"Again:\n\n    moediff bisect {ends} --repo {checkout.path} {CASE} --entry fused_experts --backend interpreter\n" in printed.out
    assert "Environment: " in printed.out
    *probes, where = printed.err.splitlines()
    assert len(probes) <= 2 + 3 + 2
    (page,) = (tmp_path / "cache" / "searches").glob("*.md")
    assert where == f"this page: {page}"
    assert page.read_text() in printed.out
    assert fingerprint(checkout.path) == before


def test_bisect_looks_for_the_signature_of_the_bad_end_any_failure_or_the_repair(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    was, now = (checkout.git("rev-parse", f"HEAD~{back}")[:12] for back in (5, 4))
    span = ["--good", "HEAD~7", "--bad", "HEAD~5", "--repo", str(checkout.path), *ONE]
    assert main(["bisect", *span, "--regress-on", "any"]) == Exit.CANNOT_TELL
    assert "since one of 2 revisions" in capsys.readouterr().out
    assert main(["bisect", "--good", "HEAD~5", "--bad", "HEAD~3", "--repo", str(checkout.path), *ONE, "--regress-on", "fixed"]) == Exit.GOOD
    page = capsys.readouterr().out
    assert page.startswith(f"## MISMATCH ZERO_OUTPUT until {was}, mended in {now} (4 repaired)\n")
    assert f"the first revision that passes is {now}; the one before it, {was}, fails" in page
    capsys.readouterr()
    assert (
        main(["bisect", "--good", "HEAD~8", "--bad", "HEAD~6", "--repo", str(checkout.path), *ONE, "--regress-on", "import"]) == Exit.GOOD
    )
    assert "(2 broken)" in capsys.readouterr().out.splitlines()[0]
    assert main(["bisect", "--good", "HEAD~8", "--bad", "HEAD~7", "--repo", str(checkout.path), *ONE]) == Exit.BAD
    assert "given as bad, is good: give a newer bad revision" in capsys.readouterr().out
    assert main(["bisect", "--good", "HEAD~6", "--bad", "HEAD", "--repo", str(checkout.path), *ONE]) == Exit.CANNOT_TELL
    assert "given as good, cannot be judged: give a good revision that can be driven" in capsys.readouterr().out


def test_bisect_goes_into_a_merge_and_knows_when_the_merge_itself_is_to_blame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Checkout(tmp_path / "merges")
    made.commit("start", sources("honest"))
    made.git("checkout", "--quiet", "-b", "side")
    made.commit("side good", {"vllm/side.py": ""})
    culprit = made.commit("side bad", sources(FAULT))
    made.commit("side end", {"vllm/side2.py": ""})
    made.git("checkout", "--quiet", "main")
    made.commit("main goes on", {"vllm/main.py": ""})
    made.git("merge", "--quiet", "--no-ff", "--message", "merge side", "side")
    span = ["bisect", "--good", "HEAD~2", "--bad", "HEAD", "--repo", str(made.path), *ONE]
    assert main(span) == Exit.GOOD
    out = capsys.readouterr().out
    assert f"since {culprit[:12]} (side bad)" in out
    assert "- merge: brought in by " in out

    made.git("checkout", "--quiet", "-b", "evil", "HEAD~1")
    made.git("merge", "--quiet", "--no-ff", "--no-commit", "side~2")
    made.commit("evil merge", sources(FAULT))
    assert main(["bisect", "--good", "HEAD~2", "--bad", "HEAD", "--repo", str(made.path), *ONE]) == Exit.GOOD
    out = capsys.readouterr().out
    assert "(evil merge)" in out
    assert "both of its parents are good: the merge itself is the culprit" in out


def test_bisect_over_releases(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(requirement: str, into: Path) -> None:
        version = requirement.partition("==")[2]
        if version == "0.29.0":
            raise StateUnavailable(f"the wheel of {requirement} could not be had: yanked")
        for name, text in sources("honest" if version < "0.31" else FAULT).items():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            (into / name).write_text(str(text).replace("from vllm._version import __version__\n", ""))

    monkeypatch.setattr(releases, "unpack", unpack)
    monkeypatch.setattr(releases, "between", lambda good, bad: ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"))
    assert main(["bisect", "--good", "release:0.28.0", "--bad", "release:0.32.0", *ONE]) == Exit.GOOD
    out = capsys.readouterr().out
    assert "since 0.31.0" in out
    assert main(["bisect", "--good", "release:0.28.0", "--bad", "release:0.32.0", "--releases", "0.31.0", *ONE]) == Exit.GOOD
    assert "3 revisions" in capsys.readouterr().out
    assert main(["bisect", "--good", "release:0.32.0", "--bad", "release:0.28.0", *ONE]) == Exit.MISUSE
    assert "must be older than 0.28.0, given as bad" in capsys.readouterr().err


def test_compare_a_revision_with_its_parent(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "HEAD~2", "--repo", str(checkout.path), *ONE]) == Exit.BAD
    out = capsys.readouterr().out
    assert out.startswith("## 1 of 1 pairs differ between before, after\n")
    assert f"| `{PAIR}` | PASS, equal | MISMATCH, {FAULT}@all, 1024 of 1024 elements, " in out
    assert "- before → after: run × numeric: loading is bit for bit alike; the output differs first at [0, 0]: " in out
    assert main(["compare", "HEAD~3", "--repo", str(checkout.path), *ONE]) == Exit.GOOD
    assert capsys.readouterr().out.startswith("## 0 of 1 pairs differ")
    assert main(["compare", "HEAD~6", "--repo", str(checkout.path), *ONE]) == Exit.CANNOT_TELL
    out = capsys.readouterr().out
    assert "after cannot be driven: importing vllm failed: ModuleNotFoundError: No module named 'nothing_of_the_kind'" in out
    assert "import × unavailable" in out


def test_compare_states_of_every_kind(checkout: Checkout, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.write(sources("honest"))
    checkout.git("diff")
    (tmp_path / "fix.patch").write_text(checkout.git("diff", "vllm") + "\n")
    checkout.git("checkout", "vllm")
    given = ["M=HEAD", f"A=HEAD+{tmp_path / 'fix.patch'}", "old=HEAD~8", f"D=dir:{checkout.path}"]
    named = [word for state in given for word in ("--state", state)]
    assert main(["compare", *named, "--repo", str(checkout.path), "--controls", *ONE]) == Exit.BAD
    out = capsys.readouterr().out
    assert f"| pair | M | A | old | D |\n|---|---|---|---|---|\n| `{PAIR}` | MISMATCH, " in out
    assert "- M → A: run × numeric" in out
    assert f"--state M={checkout.git('rev-parse', 'HEAD')} --state A={checkout.git('rev-parse', 'HEAD')}+" in out
    assert f"--state D=dir:{checkout.path} " in out
    assert "- M → D" not in out
    assert "Control (every scale of an expert without tokens doubled; 4 runs): output identical in every state." in out


def test_bits_that_changed_are_listed_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Checkout(tmp_path / "bits")
    made.commit("a", sources("honest"))
    made.commit("b", sources("ROUNDING_TRUNCATES"))
    assert main(["compare", "HEAD", "--repo", str(made.path), *ONE]) == Exit.BAD
    made.commit("c", sources("ROUNDING_TRUNCATES") | {"vllm/x.py": ""})
    assert main(["compare", "HEAD", "--repo", str(made.path), "--bits", *ONE]) == Exit.GOOD
    made.commit("d", sources("honest"))
    made.commit("e", sources("bits"))
    capsys.readouterr()
    assert main(["compare", "HEAD", "--repo", str(made.path), *ONE]) == Exit.GOOD
    assert main(["compare", "HEAD", "--repo", str(made.path), "--bits", *ONE]) == Exit.BAD
    assert "- before → after: load × bits: parameter 0.down_proj.weight changed; loading differs first in " in capsys.readouterr().out


def test_what_no_state_can_try_is_neither_alike_nor_different(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.commit("unfamiliar", sources("unfamiliar"))
    checkout.commit("and again", sources("unfamiliar") | {"vllm/y.py": ""})
    assert main(["compare", "HEAD", "--repo", str(checkout.path), *ONE]) == Exit.CANNOT_TELL
    told = "1 of the others could not be tried in any state, the first `{}`: UNAVAILABLE: no layer factory at vllm.layer:FusedMoE"
    assert told.format(PAIR) in capsys.readouterr().out
    assert main(["compare", "HEAD~1", "--repo", str(checkout.path), *ONE]) == Exit.CANNOT_TELL
    assert main(["probe", "--state", "HEAD", "--repo", str(checkout.path), *ONE]) == Exit.CANNOT_TELL


def test_an_interrupted_bisect_goes_on_and_tells_all(
    checkout: Checkout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    span = ["bisect", "--good", "HEAD~8", "--bad", "HEAD", "--repo", str(checkout.path), *ONE]
    assert main([*span, "--resume"]) == Exit.MISUSE
    assert "there is no search to resume" in capsys.readouterr().err
    ran = []

    def interrupted(tree: Tree, plan: Plan) -> StateRun:
        ran.append(tree.key)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return states.run_one(tree, plan)

    monkeypatch.setattr(commands, "run_one", interrupted)
    assert main(span) == Exit.INTERRUPTED
    assert capsys.readouterr().err.endswith("moediff: interrupted: the same command with --resume goes on from here\n")
    assert main([*span, "--resume"]) == Exit.GOOD
    resumed = capsys.readouterr()
    assert not set(ran[3:]) & set(ran[:2])
    assert main(span) == Exit.GOOD
    assert capsys.readouterr().out == resumed.out


@pytest.mark.parametrize(("back", "code", "said"), [(0, 1, "bad: "), (8, 0, "good: "), (6, 125, "unknown: ")])
def test_probe_ends_as_git_bisect_wants(back: int, code: int, said: str, checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--state", f"HEAD~{back}", "--repo", str(checkout.path), *ONE]) == code
    assert capsys.readouterr().out.startswith(said)


def test_probe_can_look_for_one_failure_or_for_the_repair(checkout: Checkout) -> None:
    at = ["--repo", str(checkout.path), *ONE]
    assert main(["probe", "--state", "HEAD~5", *at]) == 1
    assert main(["probe", "--state", "HEAD~5", "--signature", f"MISMATCH {FAULT}@all", *at]) == 125
    assert main(["probe", "--state", "HEAD", "--signature", f"MISMATCH {FAULT}@all", *at]) == 1
    assert main(["probe", "--state", "HEAD~5", "--regress-on", "fixed", *at]) == 0
    assert main(["probe", "--state", "HEAD~4", "--regress-on", "fixed", *at]) == 1


def test_probe_under_a_real_git_bisect_run(checkout: Checkout, tmp_path: Path, fakes: Installation) -> None:
    environment = {**os.environ, **HERMETIC, "PYTHONPATH": str(ROOT), "MOEDIFF_FAKE_INSTALLATION": str(fakes.root)}
    good, bad, culprit = (checkout.git("rev-parse", f"HEAD~{back}") for back in (8, 0, 2))
    checkout.git("bisect", "start", bad, good)
    probe = [sys.executable, "-m", "harness.bisect.tests.fake_moediff", "probe", *ONE, "--signature", f"MISMATCH {FAULT}@all"]
    done = subprocess.run(["git", "bisect", "run", *probe], cwd=checkout.path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{culprit} is the first bad commit" in done.stdout
    assert checkout.git("status", "--porcelain") == ""

    misuse = subprocess.run(["git", "bisect", "reset"], cwd=checkout.path, env=environment, capture_output=True, text=True, check=False)
    assert misuse.returncode == 0
    checkout.git("bisect", "start", bad, good)
    typo = [sys.executable, "-m", "harness.bisect.tests.fake_moediff", "probe", "no-such-case"]
    done = subprocess.run(["git", "bisect", "run", *typo], cwd=checkout.path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "128" in done.stdout + done.stderr
    assert "first bad commit" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["probe", "--nonsense"], "unrecognized arguments: --nonsense; see `moediff probe --help`"),
        (["probe", "no-such-case"], "'no-such-case' is not a case"),
        (["probe", *ONE, "--repo", "/nowhere"], "/nowhere holds no vllm/__init__.py: name the root of a vLLM checkout"),
        (["probe", *ONE, "--backend", "abacus"], "unknown backend 'abacus'"),
        (["probe", "--script", "absent.py"], "there is no file absent.py"),
        (["probe", "--script", __file__, CASE], f"--script takes the place of cases: leave {CASE} out"),
        (["cache", "--limit", "nan"], "argument --limit: 'nan' is no amount; see `moediff cache --help`"),
        (["cache", "--limit", "1e308"], "argument --limit: '1e308' is no amount; see `moediff cache --help`"),
        (["cache", "--limit", "abc"], "argument --limit: 'abc' is no amount; see `moediff cache --help`"),
        (["cache", "--older-than", "-1"], "argument --older-than: '-1' is no amount; see `moediff cache --help`"),
        (["compare"], "name a revision to compare with its parent, or states with --state NAME=STATE"),
        (["compare", "--state", "A=release:1.0"], "one state has nothing to be compared with"),
        (["compare", "--state", "A=release:1.0", "--state", "A=release:1.1"], "two states have the same name"),
        (["compare", "HEAD", "--repo", "/nowhere"], "there is no folder /nowhere: name a vLLM checkout with --repo"),
        (["bisect", "--good", "a"], "the following arguments are required: --bad; see `moediff bisect --help`"),
        (["bisect", "--good", "release:1.0", "--bad", "main", *ONE], "are not two revisions of one checkout, nor two releases"),
    ],
)
def test_misuse_is_one_sentence_and_128(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == Exit.MISUSE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("moediff: ")
    assert printed.err.count("\n") == 1
    assert sentence in printed.err


def test_a_parent_that_is_not_there(checkout: Checkout, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "HEAD~8", "--repo", str(checkout.path), *ONE]) == Exit.MISUSE
    assert "has no parent: it is the first commit" in capsys.readouterr().err
    checkout.git("clone", "--quiet", "--depth=1", f"file://{checkout.path}", str(tmp_path / "shallow"))
    assert main(["compare", "HEAD", "--repo", str(tmp_path / "shallow"), *ONE]) == Exit.MISUSE
    assert "is a shallow clone without" in capsys.readouterr().err


def test_a_patch_that_does_not_apply_is_125_and_a_crash_of_ours_128(
    checkout: Checkout, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fix.patch").write_text(
        "diff --git a/vllm/__init__.py b/vllm/__init__.py\n--- a/vllm/__init__.py\n+++ b/vllm/__init__.py\n@@ -1 +1 @@\n-x\n+y\n"
    )
    assert main(["probe", "--state", f"HEAD+{tmp_path / 'fix.patch'}", "--repo", str(checkout.path), *ONE]) == Exit.CANNOT_TELL
    assert "fix.patch does not apply: patch failed: vllm/__init__.py:1" in capsys.readouterr().err
    monkeypatch.setattr(commands, "run_one", lambda *_: 1 / 0)
    assert main(["probe", "--state", "HEAD", "--repo", str(checkout.path), *ONE]) == Exit.MISUSE
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_machine_that_cannot_run_the_backend_stops_a_bisect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def check(*_: object) -> None:
        raise Misuse("no GPU here")

    monkeypatch.setattr(preflight, "check", check)
    assert main(["probe", *ONE]) == Exit.MISUSE
    assert capsys.readouterr().err == "moediff: no GPU here\n"


def test_cache_is_listed_bounded_and_cleared(checkout: Checkout, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'cache'}: empty\n"
    main(["compare", "HEAD~2", "--repo", str(checkout.path), *ONE])
    capsys.readouterr()
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{tmp_path / 'cache'}: 2 trees, ")
    assert main(["cache", "--older-than", "1"]) == 0
    assert len(Cache(tmp_path / "cache").entries()) == 2
    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{tmp_path / 'cache'}: 0 trees, ")


@pytest.mark.parametrize(("command", "means"), [("compare", "0 nothing differs"), ("bisect", "0 the culprit is named"), ("probe", "1 bad")])
def test_help_says_what_the_exit_codes_of_that_command_mean(command: str, means: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert means in " ".join(capsys.readouterr().out.split())
