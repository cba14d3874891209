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
from harness.command_line import parser
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
    assert {lane["lane"] for lane in include} == set(Backend)
    assert len(include) == sum(len(spec.architectures) for spec in SPECS.values())
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
    assert any(step.get("id") == "lanes" and "tox run -q -e lanes" in step["run"] for step in asked["steps"])
    assert "python3 -m ${{ matrix.command }}" in [step.get("run") for step in lane["steps"]]
    assert "${{ matrix.architecture }}" in lane["runs-on"]
    assert [step["with"]["path"] for step in lane["steps"] if step.get("if") == "always()"] == [f"{OUT}/"]
    assert set(re.findall(r"matrix\.(\w+)", text)) <= {field.name for field in dataclasses.fields(lanes.Lane)}


def test_lanes_are_printed_where_nothing_but_the_workflow_installs_is_installed() -> None:
    absent = "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy', 'vllm', 'triton', 'jinja2')));"
    command = [sys.executable, "-c", f"{absent} from harness.cli import main; main(['lanes', '--level', 'smoke'])"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert printed.stdout.strip() == lanes.matrix(Level.SMOKE), printed.stderr
