"""What is installed, which backends can run here, and why the others cannot. vLLM is really opened, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace

from rich.box import SIMPLE_HEAD
from rich.table import Table

from harness.backends import Backend
from harness.commands.output import draw
from harness.environment import PACKAGES, child_environ, environment
from harness.exits import Exit
from harness.preflight import why_not

_OPEN = """
import sys
from harness.backends import SPECS, Backend
from harness.subject import SubjectUnavailable
from harness.suite.subjects import open_subject
try:
    print("opened:" + open_subject("vllm", Backend(sys.argv[1])).name)
except SubjectUnavailable as error:
    print("unavailable:" + str(error))
"""


def main(_: Namespace) -> int:
    """Always 0: telling is all it does."""
    here = environment()
    installed = Table("installed", "version", title="Environment", title_justify="left", box=SIMPLE_HEAD)
    for name in (*PACKAGES, *(name for name in here if name not in PACKAGES)):
        installed.add_row(name, here.get(name, "not installed") or "none")
    backends = Table("backend", "runs here", "because", title="Backends", title_justify="left", box=SIMPLE_HEAD)
    for backend in Backend:
        runs, because = diagnose(backend)
        backends.add_row(backend.value, "yes" if runs else "no", because)
    draw(installed, backends)
    return Exit.AS_THE_LEDGER_SAYS


def diagnose(backend: Backend) -> tuple[bool, str]:
    """Whether the backend can run here, and the subject's name or the reason why not."""
    if reason := why_not(backend):
        return False, str(reason)
    opened = subprocess.run([sys.executable, "-c", _OPEN, backend], capture_output=True, text=True, check=False, env=child_environ())
    said = [line.split(":", 1) for line in opened.stdout.splitlines() if line.startswith(("opened:", "unavailable:"))]
    if said:
        return said[-1][0] == "opened", said[-1][1]
    last = (opened.stderr.strip().splitlines() or ["no message"])[-1]
    return False, f"opening vLLM ended with exit code {opened.returncode}: {last}"
