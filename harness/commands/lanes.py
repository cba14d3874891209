"""The nightly matrix as one line of JSON: lane, architecture, command. A workflow reads it with fromJSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness import lanes
from harness.commands.output import say
from harness.exits import Exit
from harness.pairs import parse_level

if TYPE_CHECKING:
    from argparse import Namespace


def main(arguments: Namespace) -> int:
    """Raises Misuse for an unknown level."""
    say(lanes.matrix(parse_level(arguments.level)))
    return Exit.AS_THE_LEDGER_SAYS
