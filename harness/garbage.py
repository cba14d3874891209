"""The garbage collector: what is alive once a subject is opened is passed over from then on."""

from __future__ import annotations

import gc


def pass_over_what_lives() -> int:
    """How many objects that is. vLLM's imports leave some 700 000, which a collection looks through in 0.3 s; one is asked for after
    whatever vLLM raises (``harness/subject/device.py``), and by every count of a GPU's memory: ten times what a refused pair takes."""
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()
