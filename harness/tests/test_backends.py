from __future__ import annotations

import configparser
import dataclasses
import functools
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cases.axes import ActScale, Entry, InvalidCase, Level, Origin
from cases.case import MoECase, entry_takes
from harness import families, lanes
from harness.backends import SPECS, Backend, UnknownBackend, claimed, declared_refusal, experts_expected, has_entry, runs_default
from harness.cli import main
from harness.command_line import parser
from harness.exits import Exit
from harness.suite.options import OUT
from references.vocabulary import Activation, CheckpointFormat, Format, Layout

ROOT = Path(__file__).parents[2]


@functools.cache
def every_scheme() -> list[MoECase]:
    found = []
    for weight, scale, act, stored, origin, activation, dtype in itertools.product(
        Format, Layout, ActScale, CheckpointFormat, Origin, Activation, (Format.FP32, Format.BF16, Format.FP16)
    ):
        try:
            case = MoECase(
                experts=4,
                top_k=2,
                tokens=8,
                hidden=128,
                intermediate=128,
                dtype=dtype,
                weight=weight,
                weight_scale=scale,
                act_scale=act,
                checkpoint=stored,
                origin=origin,
                activation=activation,
            )
        except InvalidCase:
            continue
        if entry_takes(case, Entry.LAYER):
            found.append(case)
    return found


@pytest.mark.parametrize("backend", Backend)
def test_every_scheme_is_claimed_or_declared_refused_never_both(backend: Backend) -> None:
    cases = every_scheme()
    assert len(cases) > 400
    both_or_neither = [c.id for c in cases if claimed(c, Entry.LAYER, backend) == (declared_refusal(c, Entry.LAYER, backend) is not None)]
    assert not both_or_neither, f"{len(both_or_neither)} of {len(cases)}, first {both_or_neither[:3]}"


@pytest.mark.parametrize("backend", Backend)
def test_some_class_counts_wherever_the_backend_can_be_entered(backend: Backend) -> None:
    for case in every_scheme()[::7]:
        assert experts_expected(case, Entry.LAYER, backend)
    assert has_entry(Entry.LAYER, backend)


def test_marlin_leaves_unquantized_layers_to_the_default_and_says_so() -> None:
    case = next(c for c in every_scheme() if c.origin is Origin.UNQUANTIZED)
    assert runs_default(case, Backend.MARLIN)
    assert experts_expected(case, Entry.LAYER, Backend.MARLIN) == {"TritonExperts"}
    assert not runs_default(case, Backend.CUTLASS)


def test_patterns_of_what_vllm_says_compile() -> None:
    for spec in SPECS.values():
        for refusal in spec.refusals:
            re.compile(refusal.says)
            assert refusal.reason


def test_every_backend_has_a_spec_and_an_architecture() -> None:
    assert set(SPECS) == set(Backend)
    assert all(spec.architectures for spec in SPECS.values())
    assert [b for b in Backend if not SPECS[b].needs_gpu] == [Backend.INTERPRETER]


def test_lanes_of_packed_layers_are_backends() -> None:
    assert {lane for lanes_of in families.CLASSES.values() for lane in lanes_of} <= set(Backend)
    told = (ROOT / "harness/refusals_packed.py").read_text()
    named = {*re.findall(r'lane == "([^"]+)"', told), *re.findall(r'"((?:flashinfer|deep|triton)-[a-z]+|interpreter|cutlass)"', told)}
    assert len(named) > 8
    assert named <= set(Backend)


def test_unknown_backend_lists_those_that_exist() -> None:
    with pytest.raises(UnknownBackend, match=r"humming-a8.*emulation"):
        Backend.parse("cuda")


def test_tox_environments_are_the_backends() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    names = {"interpreter"} & {section.removeprefix("testenv:") for section in tox.sections()}
    generative = [re.fullmatch(r"testenv:\{(.*)\}", section) for section in tox.sections()]
    names |= {name.strip() for match in generative if match for name in match[1].split(",")}
    assert names == set(Backend)


def test_backend_option_names_every_backend(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        parser().parse_args(["run", "--help"])
    assert ", ".join(Backend) in capsys.readouterr().out


def test_lanes_are_the_backends_times_their_architectures() -> None:
    include = json.loads(lanes.matrix(Level.SMOKE))["include"]
    assert {lane["lane"] for lane in include} == set(Backend) - {Backend.AITER}  # whose GPUs this harness does not drive
    assert len(include) == sum(len(spec.architectures) for backend, spec in SPECS.items() if backend is not Backend.AITER)
    assert all(lane["driven"] for lane in include)
    assert all(lane["command"] == f"tox run -e {lane['lane']} -- --level smoke" for lane in include)
    assert len({(lane["lane"], lane["architecture"]) for lane in include}) == len(include)


def test_the_workflow_starts_a_job_for_every_lane() -> None:
    text = (ROOT / ".github/workflows/nightly.yml").read_text()
    workflow = yaml.safe_load(text)
    assert set(workflow[True]) == {"schedule", "workflow_dispatch"}  # YAML 1.1 reads the key "on" as true
    asked, lane = workflow["jobs"]["lanes"], workflow["jobs"]["lane"]
    assert lane["needs"] == "lanes"
    assert lane["strategy"] == {"fail-fast": False, "matrix": "${{ fromJSON(needs.lanes.outputs.matrix) }}"}
    assert asked["outputs"]["matrix"] == "${{ steps.lanes.outputs.matrix }}"
    assert lane["continue-on-error"] == "${{ !matrix.driven }}"
    assert "python3 -m ${{ matrix.command }}" in [step.get("run") for step in lane["steps"]]
    assert "${{ matrix.architecture }}" in lane["runs-on"]
    assert [step["with"]["path"] for step in lane["steps"] if step.get("if") == "always()"] == [f"{OUT}/"]
    assert set(re.findall(r"matrix\.(\w+)", text)) <= {field.name for field in dataclasses.fields(lanes.Lane)}


@pytest.mark.parametrize(
    ("inputs", "ends", "asked", "told"),
    [
        ({}, 0, "--level nightly", "matrix={}\n"),
        ({"level": "smoke", "backend": "triton marlin", "architecture": "sm90"}, 0,
         "--level smoke --backend triton --backend marlin --architecture sm90", "matrix={}\n"),
        ({}, 2, "--level nightly", ""),
    ],
)  # fmt: skip
def test_the_workflow_asks_for_lanes_and_ends_where_they_are_not_told(
    inputs: dict[str, str], ends: int, asked: str, told: str, tmp_path: Path
) -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
    assert set(workflow[True]["workflow_dispatch"]["inputs"]) == {"level", "backend", "architecture"}
    (step,) = (step for step in workflow["jobs"]["lanes"]["steps"] if step.get("id") == "lanes")
    assert "${{" not in step["run"]  # what was typed is data
    given = {name: inputs.get(re.findall(r"inputs\.(\w+)", text)[0], "") for name, text in step["env"].items()}
    (tmp_path / "python3").write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\necho '{{}}'\nexit {ends}\n")
    (tmp_path / "python3").chmod(0o755)
    environ = given | {"LEVEL": given["LEVEL"] or "nightly", "PATH": f"{tmp_path}:/usr/bin:/bin", "GITHUB_OUTPUT": str(tmp_path / "out")}
    done = subprocess.run(["bash", "-e", "-c", step["run"]], env=environ, cwd=tmp_path, check=False)
    assert done.returncode == ends
    # -qq: with -q tox says "lanes: OK" and "congratulations" on the stream that the matrix is read from
    assert (tmp_path / "asked").read_text() == f"-m tox run -qq -e lanes -- {asked}\n"
    assert ((tmp_path / "out").read_text() if (tmp_path / "out").exists() else "") == told


def test_lanes_are_narrowed_and_those_not_driven_are_told_where_they_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*arguments: str) -> list[tuple[str, str, bool]]:
        assert main(["lanes", *arguments]) == Exit.AS_THE_LEDGER_SAYS
        (line,) = capsys.readouterr().out.splitlines()
        return [(lane["lane"], lane["architecture"], lane["driven"]) for lane in json.loads(line)["include"]]

    assert told("--backend", "cutlass", "--backend", "triton", "--architecture", "sm90") == [
        ("triton", "sm90", True),
        ("cutlass", "sm90", True),
    ]
    assert told("--architecture", "cpu") == [("interpreter", "cpu", True)]
    assert told("--backend", "aiter") == [("aiter", "gfx942", False), ("aiter", "gfx950", False)]
    assert told() == [lane for lane in told(*(f"--backend={backend}" for backend in Backend)) if lane[2]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--backend", "abacus"], "unknown backend 'abacus'; the backends are interpreter"),
        (["--architecture", "sm70"], "no lane runs on 'sm70'; the architectures of lanes are cpu, sm80"),
        (["--backend", "cutlass", "--architecture", "sm80"], "cutlass runs on sm90, sm100, sm120, not on sm80: leave --architecture out"),
    ],
)
def test_lanes_that_do_not_exist_are_misuse(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lanes", *arguments]) == Exit.MISUSE
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert told.err.startswith(f"moediff: {says}")


def test_lanes_are_printed_where_nothing_but_the_workflow_installs_is_installed() -> None:
    absent = "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy', 'vllm', 'triton', 'jinja2')));"
    command = [sys.executable, "-c", f"{absent} from harness.cli import main; main(['lanes', '--level', 'smoke'])"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert printed.stdout.strip() == lanes.matrix(Level.SMOKE), printed.stderr
