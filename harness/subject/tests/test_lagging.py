"""The stream that lags behind the host, of a fake device: waits are there before anything else is, they are topped up, and they end."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from harness.subject import modes


class Stream:
    def __init__(self) -> None:
        self.waits, self.over, self.after = 0, 0, list[Stream]()

    def wait_stream(self, other: Stream) -> None:
        self.after.append(other)

    def record_event(self) -> Event:
        return Event(self, self.waits)


class Event:
    def __init__(self, stream: Stream, place: int) -> None:
        self._stream, self._place = stream, place

    def query(self) -> bool:
        return self._stream.over >= self._place


class Device:
    """A thread has a current stream of its own, and begins on the default one."""

    def __init__(self) -> None:
        self.default, self._current, self.cycles, self.settled = Stream(), threading.local(), set[int](), list[Stream]()
        self.poisoned: list[tuple[int, Stream, int]] = []
        self.broken_from, self.broke = 2**40, threading.Event()

    def current(self) -> Stream:
        return getattr(self._current, "stream", self.default)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current.stream = self.current(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def sleep(self, cycles: int) -> None:
        if self.current().waits >= self.broken_from:
            self.broke.set()
            raise RuntimeError("CUDA error: launch failed")
        time.sleep(0.01)  # long enough that who does not wait for it comes first
        self.cycles.add(cycles)
        self.current().waits += 1

    def poison(self, byte: int) -> None:
        self.poisoned.append((byte, self.current(), self.current().waits))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "_sleep", fake.sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fake.settled.append(fake.current()))
    monkeypatch.setattr(modes, "poison", fake.poison)
    return fake


def until(happened: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_a_stream_of_its_own_lags_behind_from_the_first_operation_to_the_last(device: Device) -> None:
    threads = threading.active_count()
    with modes.lagging():
        own = device.current()
        assert (own is device.default, own.after, device.poisoned) == (False, [device.default], [(0x7F, own, 0)])
        assert own.waits > 2, "one that the host waits for has others behind it"
        full = own.waits
        for over in (1, 2, full):
            own.over += over
            until(lambda: own.waits == own.over + full)
        time.sleep(0.02)
        assert own.waits == own.over + full, "no more than that at once"
        assert device.settled == []
    (cycles,) = device.cycles
    assert 2 * cycles / 2e9 >= sys.getswitchinterval()
    assert device.default.waits == 0
    assert (device.current(), device.settled, threading.active_count()) == (device.default, [device.default], threads)


def test_what_is_raised_inside_is_seen_and_the_waits_end(device: Device) -> None:
    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError), modes.lagging():
        raise ZeroDivisionError
    assert (device.current(), threading.active_count()) == (device.default, threads)


def ended_while_waiting(device: Device) -> None:
    with modes.lagging():
        device.current().over += 1
        assert device.broke.wait(60)


@pytest.mark.parametrize("broken_from", [0, 2, 4])
def test_what_the_waits_raise_is_raised(device: Device, broken_from: int) -> None:
    """At once, before the body begins, or while it runs."""
    device.broken_from = broken_from
    with pytest.raises(RuntimeError, match="launch failed"):
        ended_while_waiting(device)
    assert device.current() is device.default


def test_what_is_raised_inside_is_seen_before_what_the_waits_raise(device: Device) -> None:
    device.broken_from = 0
    with pytest.raises(ZeroDivisionError), modes.lagging():
        raise ZeroDivisionError
