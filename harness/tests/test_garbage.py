"""What lives when a subject is opened is passed over by the collector; what comes later is not."""

import subprocess
import sys

_LATER_AND_BEFORE = """
import gc, weakref
from harness.garbage import pass_over_what_lives

class Node: pass

def ring():
    node = Node()
    node.itself = node
    return node

dead = weakref.ref(ring())
before = ring()
assert pass_over_what_lives() > 1000
assert len(gc.get_objects()) < 100, "a collection would look at these"
assert dead() is None, "what does not live would be kept for good"
later = ring()
seen = {"before": weakref.ref(before), "later": weakref.ref(later)}
del before, later
gc.collect()
print(*[name for name, each in seen.items() if each() is not None])
"""


def test_only_what_comes_later_is_looked_at() -> None:
    """In a process of its own: what is frozen stays so."""
    ran = subprocess.run([sys.executable, "-c", _LATER_AND_BEFORE], capture_output=True, text=True, check=False)
    assert (ran.stdout.strip(), ran.stderr, ran.returncode) == ("before", "", 0)
