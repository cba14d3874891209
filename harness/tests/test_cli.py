"""``moediff`` as typed: what it prints, and how it ends."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cases.case import Level
from cases.roles import empty_expert, zero_expert
from harness import device_checks, ledger, preflight
from harness.backends import Backend
from harness.cli import main
from harness.commands.bench import collect_once
from harness.device_checks import DeviceCheck
from harness.environment import child_environ
from harness.exits import Exit, Misuse, Unavailable
from harness.gpus import default_backend, visible_gpus
from harness.loading import questions
from harness.pairs import relate, select
from harness.subject.interpreter import libcuda
from harness.verdict import Outcome, Verdict
from reports.records import Record, Recorder, Start, Status, write

FIRST = select(Level.SMOKE)[0]
ROOT = Path(__file__).parent.parent.parent
BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "{module}":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "{module}" else found(name, package)
{run}
"""


def test_list_prints_the_pairs_of_a_level_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert capsys.readouterr().out.splitlines() == [pair.id for pair in select(Level.SMOKE)]


def test_list_keeps_ids_with_every_word_and_counts_them(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [pair for pair in select(Level.SMOKE) if "silu" in pair.id and "[layer]" in pair.id]
    assert main(["list", "silu", "[layer]", "--count"]) == 0
    assert capsys.readouterr().out == f"{len(wanted)} pairs of {len({pair.case for pair in wanted})} cases\n"


def test_list_takes_words_before_and_after_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "silu", "--count", "[layer]"]) == 0
    assert main(["list", "--count", "silu", "[layer]"]) == 0
    one, other = capsys.readouterr().out.splitlines()
    assert one == other


def test_list_of_checks_has_those_of_the_device_where_a_lane_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*arguments: str) -> list[str]:
        assert main(["list", "--checks", *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    on_gpu, on_cpu = ({line.partition(":")[0] for line in told("--level=nightly", f"--backend={b}")} for b in ("triton", "interpreter"))
    assert set(DeviceCheck) <= on_gpu
    assert not set(DeviceCheck) & on_cpu
    checks = len(device_checks.of(Level.SMOKE, Backend.TRITON))
    loads = len(questions(Level.SMOKE, Backend.TRITON))
    assert told("--backend=triton", "--count") == [f"{loads} loading checks, {checks} device checks"]
    assert told("--backend=interpreter", "--count") == [f"{len(questions(Level.SMOKE, Backend.INTERPRETER))} loading checks"]
    some = told("--backend=triton", "poisoned_memory", "--entry=fused_experts")
    assert some
    assert all(line.startswith("poisoned_memory:") and line.endswith("[fused_experts]") for line in some)


def test_the_readme_names_every_check_of_the_device() -> None:
    told = (ROOT / "README.md").read_text()
    assert [check for check in DeviceCheck if f"`{check}`" not in told] == []


def test_list_keeps_what_a_lane_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--backend=marlin"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert 0 < len(told) < len(select(Level.SMOKE))
    assert all(line.endswith("[layer]") for line in told)
    assert main(["list", "--backend=marlin", "--entry=fused_experts"]) == Exit.MISUSE
    assert capsys.readouterr().err == "moediff: no pair of level smoke on marlin enters by 'fused_experts'; leave --entry out\n"
    assert main(["list", "--checks", "--backend=interpreter", "--entry=batched"]) == Exit.MISUSE
    assert "enters by 'batched'" in capsys.readouterr().err


def test_list_prints_the_exact_relations_of_a_level(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [each.id for each in relate(Level.SMOKE, (), None, Backend.INTERPRETER) if "repeated:" in each.id]
    assert main(["list", "--relations", "--backend=interpreter", "repeated:"]) == 0
    assert capsys.readouterr().out.splitlines() == wanted != []
    assert main(["list", "--relations", "--backend=interpreter", "--count", "repeated:"]) == 0
    assert capsys.readouterr().out == f"{len(wanted)} exact relations of {len(wanted)} pairs\n"


def test_show_names_the_experts_that_play_a_part_and_the_relations_and_says_things_once(capsys: pytest.CaptureFixture[str]) -> None:
    dense, lattice = (
        "int8-channel-static-quark-silu-fp16-e4k2m8h128i64-balanced",
        "int8-channel-dyntoken-ct-silu-bf16-e4k1m8h64i32-balanced-lattice",
    )
    assert main(["show", dense, "--backend", "interpreter"]) == 0
    out = capsys.readouterr().out
    case = FIRST.case.from_id(dense)
    for what, expert in ("expert without weights", zero_expert(case)), ("expert without tokens", empty_expert(case)):
        assert re.search(rf"{what} +{'none' if expert is None else expert}\b", out)
    assert out.count("quantization_config") == 1
    assert "exact relations" not in out
    assert main(["show", lattice, "--backend", "interpreter"]) == 0
    assert "unrouted_scale" in capsys.readouterr().out


def test_show_with_a_bad_ledger_says_so_before_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "issues.toml").write_text("[[issue]]\n")
    monkeypatch.setattr(ledger, "LEDGER", tmp_path / "issues.toml")
    assert main(["show", FIRST.case.id]) == Exit.MISUSE
    assert capsys.readouterr().out == ""


def test_show_says_fields_tensors_recipe_and_how_to_run_it(capsys: pytest.CaptureFixture[str]) -> None:
    case = "int8-channel-static-quark-silu-fp16-e4k2m8h128i64-balanced"
    assert main(["show", case, "--backend", "interpreter"]) == 0
    out = capsys.readouterr().out
    assert "0.gate_proj.weight_scale" in out
    assert "quant_method" in out
    assert f"moediff run {case} --entry layer --backend interpreter\n" in out


def test_doctor_says_what_is_installed_and_why_a_backend_cannot_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.commands.doctor.why_not", lambda backend: Unavailable(f"no {backend} in this test"))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out
    assert all(f"no {backend} in this test" in out for backend in Backend)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "--backend", "abacus"], "unknown backend 'abacus'; the backends are interpreter, triton"),
        (["run", "--level", "all"], "unknown level 'all'; the levels are smoke, nightly, deep"),
        (["list", "--level", "all"], "unknown level 'all'"),
        (["list", "--entry", "back"], "unknown entry 'back'; the entries are layer, fused_experts"),
        (["run", "--subject", "fake", "-k", "and and"], "'and and' is not an expression for -k (expected not OR left parenthesis"),
        (["run", "--subject", "fake", "-k", "(" * 3000], "is not an expression for -k (its parentheses are nested too deep)"),
        (["run", "--subject", "fake", "-k", "(" * 300 + "a" + ")" * 300], "nested too deep"),
        (["run", "--subject", "fake", "--records", ""], "--records names no directory; leave it out for reports/out"),
        (["matrix", "--records", "", "."], "--records names no directory; leave it out for reports/out"),
        (["show", "int8-channel-static-quark-silu-fp16-e99999999k2m99999999h128i64-balanced"], "is not a case: experts must be at most"),
        (["run", "--subject", "fake", "--records", str(Path(__file__) / "below")], "records cannot be written to"),
        (["run", "--subject", "fake", "-n", "-1"], "-n takes a number of worker processes, 0 for none, or auto, not '-1'"),
        (["run", "--subject", "fake", "-n", "foo"], "not 'foo'"),
        (["run", "--subject", "fake", "-n", "1.5"], "not '1.5'"),
        (["run", "--subject", "rust"], "unknown subject 'rust'; say vllm, fake or fake:FAULT"),
        (["run", "--subject", "vllm:ZERO_OUTPUT"], "unknown subject 'vllm:ZERO_OUTPUT'"),
        (["run", "--subject", "fake:"], "unknown fault ''; the faults are ZERO_OUTPUT, LAST"),
        (["run", "--subject", "fake:RUST"], "unknown fault 'RUST'; the faults are ZERO_OUTPUT"),
        (["run", FIRST.case.id, "--subject", "fake:BIAS_DROPPED"], "applies to none of these pairs: there is no bias; name other cases"),
        (["list", "zzzz", "[layer]"], "no pair of level smoke has 'zzzz' and '[layer]' in its id"),
        (["list", "--relations", "--backend", "marlin"], "on marlin; use --backend interpreter, or triton"),
        (["show", "a" * 400], f"'{'a' * 120}… (400 characters)' is not a case"),
        (["run", "int8"], "'int8' is not a case: id 'int8' has 1 of at least 8 parts"),
        (["show", FIRST.case.id.replace("-e", "-x", 1)], "is not a case"),
        (["show", "int8-block128-dyngroup128-ct-silu-fp16-e4k9m8h128i64-balanced"], "is not a case"),  # k > E
        (["show"], "the following arguments are required: CASE; see `moediff show --help`"),
        (["frob"], "invalid choice: 'frob'"),
        (["bench", "everything"], "invalid choice: 'everything'"),
        ([], "required: COMMAND"),
    ],
)
def test_misuse_is_one_sentence_on_stderr_and_2(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == Exit.MISUSE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("moediff: ")
    assert printed.err.count("\n") == 1
    assert sentence in printed.err


RECORD = Record.of(
    Start(case=FIRST.case.id, entry="layer", backend="interpreter", fields=asdict(FIRST.case), environment={}, worker="gw0"),
    verdict=Verdict(outcome=Outcome.PASS, claim=""),
    status=Status.CLEAN,
)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe\n", ":1: not UTF-8 text (byte 0xff)"),
        (
            RECORD.to_json().encode() + b"\n" + replace(RECORD, fields={}).to_json().encode(),
            ":2: not a record ('fields' lacks 'activation')",
        ),
        (replace(RECORD, environment=3).to_json().encode(), ":1: not a record ('environment' is 3, not an object)"),  # type: ignore[arg-type]
        (replace(RECORD, backend="zzz").to_json().encode(), ":1: not a record (unknown backend 'zzz'; the backends are"),
        (replace(RECORD, case="zzz").to_json().encode(), ":1: not a record (id 'zzz' has 1 of at least 8 parts"),
        (b"[" * 100_000, ":1: not a record ("),
        (b"", " holds no records; name the directory of a run that compared something"),
    ],
    ids=["bytes", "fields", "environment", "backend", "case", "deep", "empty"],
)
def test_a_matrix_of_what_are_no_records_names_file_and_line(
    content: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "records.jsonl").write_bytes(content)
    assert main(["matrix", str(tmp_path), "--records", str(tmp_path / "out")]) == Exit.MISUSE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"moediff: {tmp_path if content == b'' else tmp_path / 'records.jsonl'}{says}")
    assert printed.err.count("\n") == 1


def test_a_matrix_is_of_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faked = replace(RECORD, environment={"subject": "fake with ZERO_OUTPUT"}, status=Status.NEW, news="it failed")
    write(tmp_path / "1" / "records.jsonl", [faked])
    out = ["--records", str(tmp_path.parent / "out")]
    assert main(["matrix", str(tmp_path), *out]) == Exit.MISUSE
    assert "holds records of a fake only; name the directory of a run of vLLM" in capsys.readouterr().err
    write(tmp_path / "2" / "records.jsonl", [RECORD])
    assert main(["matrix", str(tmp_path), *out]) == Exit.AS_THE_LEDGER_SAYS


def test_a_matrix_of_several_runs_counts_what_was_recorded_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = replace(RECORD, backend="triton")
    again = replace(first, status=Status.NEW, news="it failed")
    half = Recorder(tmp_path / "3", "gw0")  # a run that ended before its workers' records were merged
    write(tmp_path / "1" / "records.jsonl", [again])
    write(tmp_path / "2" / "records.jsonl", [first])
    half.finished(replace(first, backend="marlin"))
    half.close()
    out = ["--records", str(tmp_path.parent / "out")]
    assert main(["matrix", str(tmp_path), *out]) == Exit.AS_THE_LEDGER_SAYS
    assert re.search(r"\bran +ran\b", capsys.readouterr().out)
    assert main(["matrix", str(tmp_path / "2"), str(tmp_path / "1"), *out]) == Exit.NEWS
    assert main(["matrix", str(tmp_path), "--backend", "humming", *out]) == Exit.MISUSE
    assert "no record is of humming; these runs are of marlin, triton" in capsys.readouterr().err
    assert main(["matrix", str(tmp_path), "--architecture", "sm90"]) == Exit.MISUSE


def test_a_matrix_of_a_run_that_was_continued_and_killed_counts_what_it_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(tmp_path, "gw0")
    recorder.finished(RECORD)
    write(tmp_path / "records.jsonl", [RECORD])
    out = ["--records", str(tmp_path.parent / "out")]
    assert main(["matrix", str(tmp_path), *out]) == Exit.AS_THE_LEDGER_SAYS
    recorder.finished(replace(RECORD, backend="marlin", status=Status.NEW, news="it failed"))
    recorder.close()
    assert main(["matrix", str(tmp_path), *out]) == Exit.NEWS
    assert f"NEW marlin  {RECORD.pair}: it failed" in capsys.readouterr().out


def test_a_malformed_ledger_is_named_by_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "issues.toml"
    broken.write_text("\n[[issue]]\nid = 3\n")
    monkeypatch.setattr(ledger, "LEDGER", broken)
    assert main(["run", "--backend", "interpreter"]) == Exit.MISUSE
    assert capsys.readouterr().err.startswith(f"moediff: {broken}:2: ")


def test_without_vllm_run_says_how_to_get_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "vllm" else object())
    assert main(["run", "--backend", "interpreter"]) == Exit.MISUSE
    assert capsys.readouterr().err == "moediff: vLLM is not installed in this environment: `tox run -e interpreter` makes one that has it\n"


def test_without_a_gpu_a_gpu_backend_is_unavailable_and_not_misuse(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["run", "--backend", "triton"]) == Exit.UNAVAILABLE
    assert "use --backend interpreter" in capsys.readouterr().err


@pytest.mark.parametrize("kept", [False, True])
def test_without_a_compiler_the_interpreter_is_unavailable_unless_the_stub_was_built_before(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "vllm" else None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    if kept:
        stub = libcuda.path_of(libcuda.FUNCTIONS, libcuda.cache_directory())
        stub.parent.mkdir()
        stub.touch()
    reason = preflight.why_not(Backend.INTERPRETER)
    assert isinstance(reason, Unavailable) is not kept
    assert reason is None or "ziglang" in str(reason)


def test_without_a_compiler_moediff_run_and_pytest_say_the_same(tmp_path: Path) -> None:
    options = [f"--records={tmp_path / 'out'}", "--backend=interpreter", "-n0"]
    environ = {**outside(), "XDG_CACHE_HOME": str(tmp_path), "PATH": ""}
    environ.pop("CC", None)
    commands = [["harness.cli", "run", FIRST.case.id], ["pytest", "-p", "no:cacheprovider", f"--case={FIRST.case.id}", "harness/suite"]]
    ended = [
        subprocess.run(
            [sys.executable, "-c", BLOCKED.format(module="ziglang", run=f"import runpy; sys.argv = {[*command, *options]}; "
             f"runpy.run_module({command[0]!r}, run_name='__main__', alter_sys=True)")],
            capture_output=True, text=True, check=False, env=environ, cwd=ROOT,
        )
        for command in commands
    ]  # fmt: skip
    wanted = Exit.UNAVAILABLE if importlib.util.find_spec("vllm") else Exit.MISUSE
    assert [done.returncode for done in ended] == [wanted, wanted]
    assert ended[0].stderr == ended[1].stderr
    assert ended[0].stderr.startswith("moediff: ")
    assert ended[0].stderr.count("\n") == 1


def test_a_fake_subject_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "why_not", lambda backend: Misuse("no"))
    preflight.check(Backend.INTERPRETER, "fake:SOMETHING")
    with pytest.raises(Misuse, match="no"):
        preflight.check(Backend.INTERPRETER, "vllm")


def outside() -> dict[str, str]:
    """The environment without what xdist sets around this test."""
    return {name: value for name, value in child_environ().items() if not name.startswith("PYTEST_")}


def stubbed(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness.cli", "run", "--subject=fake", f"--records={tmp_path / 'out'}", *arguments]
    environ = {**outside(), "PYTEST_PLUGINS": "harness.tests.stub_run"}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environ, timeout=300)


def test_run_one_case_from_anywhere(tmp_path: Path) -> None:
    done = stubbed(tmp_path, FIRST.case.id, "--entry", FIRST.entry, "--backend", "interpreter")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert len(list(tmp_path.glob("out/*/records.jsonl"))) == 1


def test_a_case_named_twice_runs_once(tmp_path: Path) -> None:
    done = stubbed(tmp_path, FIRST.case.id, FIRST.case.id, "--entry", FIRST.entry, "--backend", "interpreter")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_run_with_an_expression_that_matches_nothing_is_misuse(tmp_path: Path) -> None:
    done = stubbed(tmp_path, "-k", "nothing_like_this", "--backend", "interpreter")
    assert done.returncode == Exit.MISUSE
    assert done.stderr == (
        "moediff: no pair matches -k 'nothing_like_this'; `moediff list --level smoke` prints the ids, `moediff list --level smoke "
        "--checks --backend interpreter` those of checks of loading and, on a GPU, of the device\n"
    )


def test_a_planted_fault_is_found_named_and_repeatable_without_vllm(tmp_path: Path) -> None:
    case = "int8-channel-static-quark-silu-fp16-e4k2m8h128i64-balanced"
    options = ["--backend=interpreter", f"--records={tmp_path}", case, "--entry=fused_experts"]
    command = [sys.executable, "-m", "harness.cli", "run", *options]
    honest, faulty = (
        subprocess.run([*command, f"--subject={subject}"], capture_output=True, text=True, check=False, env=outside())
        for subject in ("fake", "fake:W2_SCALE_OF_NEIGHBOUR_EXPERT")
    )
    assert honest.returncode == 0, honest.stdout
    assert faulty.returncode == 1
    assert "named    W2_SCALE_OF_NEIGHBOUR_EXPERT" in faulty.stdout
    assert f"again    moediff run {case} --entry fused_experts --backend interpreter --subject fake:W2_SCALE" in faulty.stdout


@pytest.mark.parametrize("module", ["rich", "jinja2", "pytest", "xdist", "pytest_timeout", "packaging"])
def test_without_a_module_that_the_harness_needs_a_run_says_so_before_it_begins(module: str, tmp_path: Path) -> None:
    arguments = ["run", "--subject=fake", f"--records={tmp_path / 'out'}", FIRST.case.id]
    program = BLOCKED.format(module=module, run=f"from harness.cli import main; sys.exit(main({arguments}))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=outside())
    sentence = f"the Python module '{module}' is not installed in this environment; `pip install -e .` installs what moediff needs"
    assert (done.returncode, done.stdout, done.stderr) == (Exit.MISUSE, "", f"moediff: {sentence}\n")
    assert not (tmp_path / "out").exists()


def test_collecting_nightly_imports_neither_torch_nor_vllm() -> None:
    collected = collect_once(Level.NIGHTLY)
    assert collected.pairs == len(select(Level.NIGHTLY))
    assert collected.relations == len(relate(Level.NIGHTLY, (), None, default_backend(visible_gpus()))) > 0
    assert not {"torch", "vllm", "triton"} & set(collected.imported)
