"""What the hooks of a run keep in pytest's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from harness.exits import Exit
from harness.suite.options import Options


class Stopped(NamedTuple):
    """Why a run ended before its pairs did."""

    sentence: str
    exit: Exit


OPTIONS = pytest.StashKey[Options]()
DIRECTORY = pytest.StashKey[Path]()
RECORDED = pytest.StashKey[frozenset[str]]()
DONE = pytest.StashKey[bool]()  # tests of a run that is continued were left out, for they have records
STOPPED = pytest.StashKey[Stopped]()
