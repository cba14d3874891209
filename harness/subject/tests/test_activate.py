"""The lane is entered early, through vLLM's own plugin door, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from harness.subject.interpreter import activate, platform


def _python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    keep = {name: value for name, value in os.environ.items() if name not in activate.ENVIRONMENT and name not in activate.DEFAULTS}
    return subprocess.run([sys.executable, "-c", program], env=keep | environment, capture_output=True, text=True, check=False)


def test_the_plugin_declines_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(activate.LANE_VARIABLE, raising=False)
    assert platform.register() is None
    monkeypatch.setenv(activate.LANE_VARIABLE, activate.LANE)
    assert platform.register() == "harness.subject.interpreter.platform.InterpreterPlatform"


def test_asking_imports_nothing() -> None:
    done = _python("import sys, harness.subject.interpreter.platform as p; p.register(); print({'torch', 'vllm'} & set(sys.modules))")
    assert done.stdout.strip() == "set()"


def test_preparing_sets_what_is_read_while_importing() -> None:
    program = "import os; from harness.subject.interpreter.activate import *; prepare_environment(); print(os.environ[%r])"
    for name, value in activate.ENVIRONMENT.items():
        assert _python(program % name).stdout.strip() == value, name


def test_a_level_the_user_chose_stays() -> None:
    program = "import os; from harness.subject.interpreter.activate import *; prepare_environment(); print(os.environ[%r])"
    assert _python(program % "VLLM_LOGGING_LEVEL", VLLM_LOGGING_LEVEL="DEBUG").stdout.strip() == "DEBUG"


@pytest.mark.parametrize("module", ["triton", "vllm"])
def test_too_late_says_so(module: str) -> None:
    done = _python(
        f"import sys, types; sys.modules[{module!r}] = types.ModuleType({module!r})\n"
        "from harness.subject.interpreter.activate import prepare_environment; prepare_environment()"
    )
    assert done.returncode
    last = done.stderr.strip().splitlines()[-1]
    assert f"{module} was imported before the interpreter lane was prepared" in last
    assert "TRITON_INTERPRET='1'" in last


def test_a_source_tree_offers_the_same_entry_point() -> None:
    sys.meta_path.append(activate._SourceTreeFinder())
    try:
        found = [point for point in entry_points(group=activate.ENTRY_POINT_GROUP) if point.name == activate.ENTRY_POINT_NAME]
    finally:
        sys.meta_path.pop()
    assert {point.value for point in found} == {activate.ENTRY_POINT_VALUE}
    assert found[0].load() is platform.register


@pytest.mark.vllm
def test_vllm_lands_on_the_platform(interpreter: None) -> None:
    from vllm.platforms import current_platform

    assert type(current_platform).__name__ == "InterpreterPlatform"
    assert current_platform.is_cuda_alike()
    assert current_platform.get_device_capability() == (9, 0)


@pytest.mark.vllm
def test_another_platform_is_named() -> None:
    done = _python(
        "from harness.subject.interpreter.activate import activate; activate()",
        VLLM_PLUGINS="somebody_elses",
    )
    assert done.returncode
    assert "instead of the interpreter platform" in done.stderr.strip().splitlines()[-1]
    assert "moediff_interpreter" in done.stderr.strip().splitlines()[-1]
