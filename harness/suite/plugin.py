"""The pytest plugin: options, one worker per process, one run directory. Imports neither torch nor vLLM. How a run ends is in ending.py.

A process runs pairs (an xdist worker, or pytest without ``-n``), or gathers what they wrote (the xdist controller, or again
pytest without ``-n``).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import device_checks, ledger, loading
from harness.architectures import VARIABLE
from harness.backends import SPECS, Backend
from harness.exits import Exit, Misuse
from harness.gpus import cores, gpu_gib, visible_gpus, worker_count, worker_environment
from harness.ledger import LedgerError
from harness.preflight import check, require
from harness.subject import SubjectUnavailable
from harness.suite import gather, order, resume
from harness.suite.options import Options, add_to, made
from harness.suite.stash import DIRECTORY, DONE, OPTIONS, RECORDED, STOPPED, Stopped
from harness.suite.worker import Worker
from reports.records import RecordsUnwritable

pytest_plugins = ["harness.suite.ending"]
_OPTIONAL = {"related", "loading", "checked"}
_ended = type("moediff", (pytest.exit.Exception,), {})  # pytest writes the name of the class before the sentence


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the pairs."""
    add_to(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Neighbours share kernels: each worker takes a stretch of the tests, so that most are compiled by one."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def pytest_configure(config: pytest.Config) -> None:
    """Validate, prepare the process before anything imports torch, choose the run's directory."""
    for backend in Backend:
        config.addinivalue_line("markers", f"{_marker(backend)}: on every test of a run of the {backend} lane")
    try:
        options = Options.of(config)
        ledger.load(ledger.LEDGER)
    except Misuse as error:
        raise _ended(str(error), returncode=error.exit) from None
    except LedgerError as error:
        raise _ended(str(error), returncode=Exit.MISUSE) from None
    config.stash[OPTIONS] = options
    given = getattr(config, "workerinput", {})
    config.stash[DIRECTORY] = Path(given["moediff_directory"]) if given else gather.directory(options)
    try:
        config.stash[RECORDED] = frozenset(given["moediff_recorded"]) if given else resume.recorded(options)
    except (Misuse, RecordsUnwritable) as error:
        raise _ended(str(error), returncode=Exit.MISUSE) from None


def _marker(backend: Backend) -> str:
    """The backend's name as a word of ``-m``."""
    return backend.replace("-", "_")


def prepare_process(options: Options) -> None:
    """Set what torch, triton and vLLM read while they are imported."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    os.environ.update(worker_environment(options.backend, worker_id(), visible_gpus(), workers))
    if options.architecture:
        os.environ[VARIABLE] = options.architecture
    if not SPECS[options.machine].needs_gpu and options.subject == "vllm":
        from harness.subject.interpreter.activate import prepare_environment

        prepare_environment()


def worker_id() -> str:
    """ "gw3", or "main" without xdist."""
    return os.environ.get("PYTEST_XDIST_WORKER", "main")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """The lane, and why where it was not asked for; of a run that is continued, which harness it began with."""
    backend, asked = config.stash[OPTIONS].backend, config.getoption("backend")
    seen = f"{len(visible_gpus())} GPUs are visible" if visible_gpus() else "no GPU is visible"
    architecture = config.stash[OPTIONS].architecture
    lane = f"{backend}, answering as {architecture}" if architecture else backend
    which = f"moediff: backend {lane}" + (f", because {seen} and no --backend was given" if asked is None else "")
    device = any("test_cuda" in argument for argument in config.args) and not SPECS[backend].needs_gpu
    none = "moediff: checks of the device are asked on a GPU's lane only; `moediff list --checks --backend triton` prints them"
    return [
        which,
        *([none] if device else []),
        *filter(None, [resume.other_commits(config.stash[OPTIONS]), resume.other_level(config.stash[OPTIONS])]),
    ]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """``-n auto``: GPUs x slots on a CUDA lane, cores elsewhere."""
    try:
        backend = Options.of(config).machine
    except Misuse:
        return 1  # too early to end with a sentence; pytest_configure does
    return worker_count(backend, visible_gpus(), cores(), gpu_gib())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell each xdist worker where to write, and what to leave out: a worker that starts later would read other records."""
    node.workerinput["moediff_directory"] = str(node.config.stash[DIRECTORY])
    node.workerinput["moediff_recorded"] = sorted(node.config.stash[RECORDED])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per pair, per question about its loading, per exact relation of each lattice pair, and per check of the device."""
    options = metafunc.config.stash[OPTIONS]
    if "pair" in metafunc.fixturenames:
        pairs = options.pairs()
        metafunc.parametrize("pair", pairs, ids=[pair.id for pair in pairs])
    if "loading" in metafunc.fixturenames:
        asked = loading.chosen(options)
        metafunc.parametrize("loading", asked, ids=[each.id for each in asked])
    if "checked" in metafunc.fixturenames:
        checked = () if options.loads_only else device_checks.checks(options)
        metafunc.parametrize("checked", checked, ids=[each.id for each in checked])
    if "related" in metafunc.fixturenames:
        related = options.related()
        metafunc.parametrize("related", related, ids=[each.id for each in related])


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Cases named may have no relations or questions, and a lane no device: no test, rather than a skipped one."""
    report = yield
    report.result = [each for each in report.result or () if not isinstance(each, pytest.Item) or not _of_nothing(each)]
    return report


def _of_nothing(item: pytest.Item) -> bool:
    return item.get_closest_marker("skip") is not None and bool(_OPTIONAL & set(getattr(item, "fixturenames", ())))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Every test has its lane's marker; where kernels are compiled, the tests that share them stand together. Of what -k and the like
    left there is no test for what has a record."""
    for item in items:
        item.add_marker(_marker(config.stash[OPTIONS].backend))
    if SPECS[config.stash[OPTIONS].machine].needs_gpu:
        items[:] = order.by_kernel(items)
    yield
    chosen = len(items)
    items[:] = [item for item in items if (asked := order.asked(item)) is None or asked.id not in config.stash[RECORDED]]
    config.stash[DONE] = chosen > len(items)
    getattr(config, "workeroutput", {})["moediff_done"] = config.stash[DONE]


@pytest.fixture(scope="session")
def worker(pytestconfig: pytest.Config) -> Iterator[Worker]:
    """The process's worker; opens the subject with its first pair."""
    options = pytestconfig.stash[OPTIONS]
    prepare_process(options)
    opened: Worker | None = None
    try:
        require("rich", "jinja2")  # for the end of the run, which should not be the place to find out
        check(options.machine, options.subject)
        opened = Worker(options, made(pytestconfig.stash[DIRECTORY]), worker_id(), functools.partial(lose_device, pytestconfig))
        opened.open()
    except (SubjectUnavailable, Misuse, RecordsUnwritable) as error:
        pytestconfig.stash[STOPPED] = Stopped(str(error), getattr(error, "exit", Exit.MISUSE))
    if stopped := pytestconfig.stash.get(STOPPED, None):
        pytest.fail(stopped.sentence, pytrace=False)
    assert opened is not None
    yield opened
    opened.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A pair whose record cannot be written ends the run."""
    try:
        return (yield)
    except RecordsUnwritable as error:
        item.config.stash[STOPPED] = Stopped(str(error), Exit.MISUSE)
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def lose_device(config: pytest.Config, pair: str) -> None:
    """The record is written. A worker of xdist ends here and is replaced; a process of its own ends the run after this pair."""
    if hasattr(config, "workerinput"):
        os._exit(Exit.NEWS)  # atexit handlers would call into the lost context
    sentence = f"the CUDA context of this process was lost at {pair}, and the pairs after it were not run: with -n 1 the worker is replaced"
    config.stash[STOPPED] = Stopped(sentence, Exit.NEWS)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: Any) -> None:
    """A worker that ended itself after the record of a pair has said all there is to say of it."""
    if record := gather.last_record(report.node.config.stash[DIRECTORY], report.node.gateway.id, crashitem):
        report.when, report.outcome, report.longrepr = ("call", "failed", record.news) if record.news else ("call", "passed", None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A subject that cannot be driven here ends the run, not one pair after another."""
    result = yield
    if stopped := item.config.stash.get(STOPPED, None):
        item.session.shouldstop = stopped.sentence
        getattr(item.config, "workeroutput", {})["moediff_stopped"] = [stopped.sentence, int(stopped.exit)]
    return result
