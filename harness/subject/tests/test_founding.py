"""The founding fault (vllm#58532) in the vLLM that is installed, and gone with a correction of the kernel's source."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.backends import Backend
from harness.bisect.cache import Cache
from harness.bisect.installation import Installation
from harness.bisect.spec import Release, State
from harness.bisect.states import environment
from harness.bisect.trees import planted
from harness.founding import CASES, OPPOSITE, Standing, rows
from harness.ledger import LEDGER, load

if TYPE_CHECKING:
    from harness.subject.vllm_layer import VllmSubject

pytestmark = pytest.mark.vllm

CORRECTION = Path(__file__).parents[2] / "bisect" / "tests" / "data" / "weight_scale_by_shape.patch"
AFFECTED = next(issue for issue in load(LEDGER).issues if issue.id == "int8-channel-static-flat-index-exact").vllm
CORRECTED = """
import json, sys
from cases.case import Entry, MoECase
from cases.lattice_pairs import lattice_pairs
from cases.case import Level
from harness.backends import Backend
from harness.exact import Drive, verdict
from harness.founding import rows
from harness.relations import asked
from harness.subject.vllm_layer import VllmSubject

lane, subject = Backend.INTERPRETER, VllmSubject()
told = {"subject": subject.name, "rows": [row.standing for text in sys.argv[1:] for row in rows(text, subject)], "relations": {}}
drive = Drive(subject)
for text in sys.argv[1:]:
    case = MoECase.from_id(text)
    start = drive.setting(case, Entry.FUSED_EXPERTS, lane)
    for relation in asked(case, Entry.FUSED_EXPERTS, lane):
        found = verdict(relation, start, drive)
        told["relations"][f"{relation}:{text}"] = f"{found.outcome} {found.signature}".strip()
print(json.dumps(told))
"""


@pytest.mark.parametrize("text", CASES)
def test_every_row_is_wrong_by_the_flat_index_to_the_bit(text: str, subject: VllmSubject) -> None:
    if version("vllm") not in AFFECTED:
        pytest.fail(f"the ledger says that vllm {version('vllm')} is not affected: narrow this test with it")
    found = list(rows(text, subject))
    assert {row.standing for row in found} == {Standing.FLAT_INDEX}, [row for row in found if row.standing is not Standing.FLAT_INDEX]
    assert all("_scale.flatten()[" in row.used and "(0x" in row.expected and "(0x" in row.actual for row in found)


@pytest.mark.parametrize("text", OPPOSITE)
def test_per_token_activations_with_per_tensor_weights_are_right_in_every_row(text: str, subject: VllmSubject) -> None:
    assert {row.standing for row in rows(text, subject)} == {Standing.CORRECT}


@pytest.mark.timeout(600)
def test_a_corrected_kernel_is_right_in_every_row_and_keeps_every_relation(tmp_path: Path) -> None:
    state = State(name="corrected", base=Release(version=version("vllm")), patches=(CORRECTION,))
    with planted(state, Cache(tmp_path), Installation.find()) as tree:
        done = subprocess.run(
            [sys.executable, "-P", "-c", CORRECTED, *CASES],
            env=environment(tree, Backend.INTERPRETER),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert "+tree." in told["subject"]
    assert set(told["rows"]) == {Standing.CORRECT}
    assert {relation: ended for relation, ended in told["relations"].items() if ended != "PASS"} == {}
    assert len(told["relations"]) >= 2 * 12
