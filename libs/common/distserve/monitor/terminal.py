"""The terminal while a picture is on it: keys as they are pressed, and as it was afterwards, whatever ends it."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDS = (signal.SIGTERM, signal.SIGHUP)


class Waker:
    """Ends a wait from another thread, or from a signal."""

    def __init__(self) -> None:
        self.fd, self._end = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._end, False)

    def wake(self) -> None:
        try:
            os.write(self._end, b"x")
        except OSError:  # full: it wakes already; closed: nobody waits any more
            pass

    def drain(self) -> None:
        try:
            while os.read(self.fd, 1024):
                pass
        except OSError:
            pass

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._end)


class Keys:
    """Reads what is pressed, where standard input is a terminal that is ours."""

    def __init__(self, fd: int | None, waker: Waker) -> None:
        self._fd = fd
        self._waker = waker
        self._interrupted = False

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """For Ctrl-C. Noted, not raised: an exception in the wrong place, a finaliser's say, would be lost. The second
        one is raised."""
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True
        self._waker.wake()

    def wait(self, timeout_s: float) -> str:
        """Keys that came within timeout_s, q for Ctrl-C; empty if it went by, or something else woke us."""
        ends = time.monotonic() + timeout_s
        while not self._interrupted:
            watched = [self._waker.fd] if self._fd is None else [self._waker.fd, self._fd]
            ready, _, _ = select.select(watched, [], [], max(0.0, ends - time.monotonic()))
            self._waker.drain()
            if self._fd not in ready or self._fd is None:
                return "q" if self._interrupted else ""
            try:
                pressed = os.read(self._fd, 64).decode(errors="ignore")
            except OSError:
                pressed = ""
            if pressed:
                return pressed
            self._fd = None  # the terminal has gone: without keys from here on
        return "q"


@contextmanager
def keys(waker: Waker) -> Iterator[Keys]:
    """Keys without echo and without a line's end. In the background, or without a terminal, there are none. SIGTERM
    and SIGHUP end what is inside as SystemExit, so that the terminal is put back; a resize wakes."""
    fd = sys.stdin.fileno() if _is_ours() else None
    before = termios.tcgetattr(fd) if fd is not None else None
    handlers = {number: signal.signal(number, _leave) for number in _ENDS}
    pressed = Keys(fd, waker)
    handlers[signal.SIGINT] = signal.signal(signal.SIGINT, pressed.interrupt)
    handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda number, frame: waker.wake())
    try:
        if fd is not None:
            tty.setcbreak(fd, termios.TCSANOW)
        yield pressed
    finally:
        if fd is not None and before is not None:
            try:
                termios.tcsetattr(fd, termios.TCSANOW, before)
            except termios.error:  # it has gone
                pass
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _is_ours() -> bool:
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
