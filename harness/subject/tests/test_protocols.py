"""Who claims a protocol takes what it says: the same names, kinds and defaults. isinstance sees no more than the names of methods."""

from __future__ import annotations

import inspect

import pytest

from harness.subject import HasModes, OnDevice, Subject, TakesViews
from harness.subject.fake import FakeSubject, RefusingFake
from harness.subject.fake_loading import FakeLoading
from harness.subject.loading import HasRanks, ReadsDirectories, WatchedLoading
from harness.subject.vllm_layer import VllmSubject
from harness.tests.fake_device import FakeDevice

ALL = (Subject, TakesViews, OnDevice, HasModes, ReadsDirectories, WatchedLoading, HasRanks)
CLAIMS = [
    *((VllmSubject, protocol) for protocol in ALL),
    *((fake, Subject) for fake in (FakeSubject, RefusingFake)),
    *((FakeLoading, protocol) for protocol in (ReadsDirectories, WatchedLoading, HasRanks)),
    *((FakeDevice, protocol) for protocol in (Subject, HasModes)),
]


def _verbs(protocol: type) -> dict[str, inspect.Signature]:
    found = {name: getattr(protocol, name) for name in dir(protocol) if not name.startswith("_")}
    return {name: inspect.signature(each) for name, each in found.items() if inspect.isfunction(each)}


def _shape(signature: inspect.Signature) -> list[tuple[str, object, object]]:
    return [(each.name, each.kind, each.default) for each in signature.parameters.values()]


@pytest.mark.parametrize(("subject", "protocol"), CLAIMS, ids=[f"{subject.__name__}-{protocol.__name__}" for subject, protocol in CLAIMS])
def test_a_verb_takes_what_its_protocol_says(subject: type, protocol: type) -> None:
    verbs = _verbs(protocol)
    assert verbs
    for name, wanted in verbs.items():
        assert _shape(inspect.signature(getattr(subject, name))) == _shape(wanted), name
