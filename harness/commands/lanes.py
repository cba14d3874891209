"""The nightly matrix as one line of JSON: lane, architecture, command, and whether this harness can drive it. A workflow reads it with
fromJSON. Lanes that are not driven yet are left out unless they are named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness import lanes
from harness.commands.output import say
from harness.exits import Exit
from harness.pairs import parse_level
from harness.suite.options import parse_backend

if TYPE_CHECKING:
    from argparse import Namespace


def main(arguments: Namespace) -> int:
    """Raises Misuse for an unknown level, backend or architecture, and where no lane is of both."""
    backends = [parse_backend(text) for text in arguments.backend]
    architectures = [lanes.parse_architecture(text) for text in arguments.architecture]
    say(lanes.matrix(parse_level(arguments.level), backends, architectures))
    return Exit.AS_THE_LEDGER_SAYS
