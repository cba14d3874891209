"""How a run ends, in the process that gathers: one file of records, the exit code, the summary; and what Ctrl-C leaves."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from typing import Any

import pytest

from harness.exits import Exit
from harness.suite import gather
from harness.suite.stash import DIRECTORY, DONE, OPTIONS, STOPPED, Stopped
from reports.records import Record, RecordsUnwritable, Status, gathered


def pytest_configure(config: pytest.Config) -> None:
    """Workers of xdist do not gather."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Ending(config), "moediff-ending")


def _forget_timers() -> None:
    """One of pytest-timeout's that was interrupted while it was set or cancelled would keep this process for its ten minutes."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.cancel()


class Ending:
    """Hooks of the gathering process."""

    def __init__(self, config: pytest.Config) -> None:
        """``config``: of this run."""
        self._config = config
        self._asked = 0  # tests of the run
        self._crashed: set[str] = set()  # workers that ended by themselves
        self._interrupted = False
        self._records: list[Record] = []
        self._stale: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without xdist this process knows how many tests there are."""
        self._asked = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """With it the workers do."""
        self._asked = len(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker that could not drive the subject has said why; one that crashed has not. Each says whether tests had a record."""
        self._config.stash[DONE] = self._config.stash.get(DONE, False) or getattr(node, "workeroutput", {}).get("moediff_done", False)
        if given := getattr(node, "workeroutput", {}).get("moediff_stopped"):
            self._config.stash[STOPPED] = Stopped(given[0], Exit(given[1]))
        elif error and error != "keyboard-interrupt":
            self._crashed.add(node.gateway.id)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Ctrl-C, here or in a worker; other ways to stop a session come through here too."""
        self._interrupted = excinfo.type is KeyboardInterrupt or "keyboard-interrupt" in str(excinfo.value)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Once every worker has ended: one file of records, and an exit status that says what they say."""
        options, directory = self._config.stash[OPTIONS], self._config.stash[DIRECTORY]
        stopped = self._config.stash.get(STOPPED, None)
        self._interrupted = self._interrupted and stopped is None
        if self._interrupted:
            _forget_timers()
        if directory.is_dir():
            crashed = self._crashed if self._interrupted or stopped else None
            try:
                self._records = gather.gather(directory, crashed)
            except RecordsUnwritable as error:
                self._records = gathered(directory, crashed)
                stopped = self._config.stash.setdefault(STOPPED, Stopped(str(error), Exit.MISUSE))
        if stopped:
            session.exitstatus = stopped.exit
            self._say_once(stopped.sentence)
        elif self._interrupted:
            session.exitstatus = Exit.INTERRUPTED
        elif self._records:
            if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
                if not self._config.stash.get(DONE, False):
                    self._records = []  # nothing matches: no summary of what was there before
                    return
                session.exitstatus = Exit.AS_THE_LEDGER_SAYS  # nothing was left to run
            self._stale = gather.stale(options)
            if session.exitstatus == Exit.AS_THE_LEDGER_SAYS and (self._stale or any(r.status is Status.NEW for r in self._records)):
                session.exitstatus = Exit.NEWS

    def _say_once(self, sentence: str) -> None:
        """Each worker has failed a test with the sentence that ends the run."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            for kind in ("error", "failed"):
                reporter.stats[kind] = [report for report in reporter.stats.get(kind, ()) if sentence not in report.longreprtext]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Cases by outcome, upstream faults confirmed, what is new, where the records are."""
        config = self._config
        if self._records:
            from reports import summary  # only now: collecting must stay quick

            text = summary.render(
                self._records,
                self._stale,
                where=os.path.relpath(config.stash[DIRECTORY]),
                width=max(100, min(shutil.get_terminal_size().columns, 160)),
                color=terminalreporter.hasmarkup,
                unfinished=self._asked - len(self._records) if self._interrupted or STOPPED in config.stash else 0,
                left_out=gather.left_out(config.stash[OPTIONS]),
            )
            terminalreporter.write_line(text)
        if stopped := config.stash.get(STOPPED, None):
            sys.stderr.write(f"moediff: {stopped.sentence}\n")
        elif self._interrupted:
            done = f"after {len(self._records)} of {self._asked} tests" if self._asked else "before any test was collected"
            sys.stderr.write(f"moediff: interrupted {done}\n")
