"""What the controller does with the workers' files: a directory for the run, and afterwards one set of records and a page."""

from __future__ import annotations

import os
from datetime import datetime
from typing import TYPE_CHECKING

from reports.records import Record, merge

if TYPE_CHECKING:
    from pathlib import Path

    from harness.suite.options import Options


def new_directory(options: Options) -> Path:
    """A name of this run's own under ``--records``; nothing is created until a worker writes."""
    what = "cases" if options.cases else options.level.value
    return options.records / f"{datetime.now():%Y%m%d-%H%M%S}-{options.backend}-{what}-{os.getpid()}"


def gather(directory: Path) -> list[Record]:
    """Merge, write the page, and return every record of the run."""
    from reports import html  # only now: collecting must stay quick

    records = merge(directory)
    html.write(directory, records)
    return records
