"""The garbage collector: what is alive once a subject is opened is passed over from then on."""

from __future__ import annotations

import gc


def pass_over_what_lives() -> int:
    """How many objects that is. vLLM's imports leave some 700 000, which a collection looks through in 0.3 s, ten times what a loading
    takes; whoever counts or fills a GPU's memory asks for one, and vLLM's loader for two."""
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()
