"""Work in small steps, for whoever has the time: the event loop while the steps are short, a thread while they are not.

A hand-over to a thread and back costs as much as copying some hundred KiB, so what is small is done on the loop; what
is large would keep the loop from everything else. Code that is written as a generator of steps reads from top to
bottom and need not know who runs it.
"""

from __future__ import annotations

import asyncio
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Generator
from enum import Enum, auto
from typing import TypeAlias, TypeVar

from distserve.transport.fence import post

TURN_S = 100e-6  # after this long on the loop others have a turn; one step may overrun it
T = TypeVar("T")


class Step(Enum):
    WAIT = auto()  # nothing to do until the socket is readable
    IDLE = auto()  # as WAIT, and nothing is half done
    PIECE = auto()  # a bounded piece of work was done, more follows
    BULK = auto()  # more than a few pieces follow: not for the loop


Steps: TypeAlias = Generator[Step, None, T]


class Stepper:
    """Runs one socket's steps to their end. A thread is made for the first BULK and has the steps until they are IDLE;
    on_loop says who has them. Made and started on the loop."""

    def __init__(
        self,
        steps: Steps[None],
        sock: socket.socket,
        close: Callable[[], None],
        ended: Callable[[BaseException | None], None],
        name: str,
    ) -> None:
        """At the end, which may be an exception: close() by whoever has the steps, once nobody watches the socket any
        more; then ended(exception) on the loop, after all that went through call()."""
        self.on_loop = True
        self._loop = asyncio.get_running_loop()
        self._steps = steps
        self._socket = sock
        self._close = close
        self._ended = ended
        self._name = name
        self._again = False  # a turn is due that does not depend on the socket
        self._over = False
        self._thread: threading.Thread | None = None
        self._work: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: the steps are the thread's; False: no more

    def start(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self._on_readable)

    def call(self, function: Callable[..., None], *args: object) -> None:
        """For the steps: function(*args) on the loop, in order; at once if that is where they run."""
        if self.on_loop:
            function(*args)
        else:
            post(self._loop, function, *args)

    # -- on the loop

    def _on_readable(self) -> None:
        if not self._again:
            self._turn()

    def _turn(self) -> None:
        self._again = False
        if self._over or not self.on_loop:
            return
        stop_at = time.perf_counter() + TURN_S
        error: BaseException | None = None
        try:
            for step in self._steps:
                if step is Step.WAIT or step is Step.IDLE:
                    return
                if step is Step.BULK:
                    self._hand_over()
                    return
                if time.perf_counter() >= stop_at:
                    self._again = True
                    self._loop.call_soon(self._turn)
                    return
        except Exception as e:
            error = e
        self._loop.remove_reader(self._socket.fileno())
        self._close()
        self._end(error)

    def _hand_over(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self.on_loop = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._work.put(True)

    def _take_back(self) -> None:
        self.on_loop = True
        self._loop.add_reader(self._socket.fileno(), self._on_readable)
        self._turn()  # something may have come in between

    def _end(self, error: BaseException | None) -> None:
        self._over = True
        if self._thread is not None:
            self._work.put(False)
            self._thread.join()  # it has nothing left to do but return
        self._ended(error)

    # -- the thread

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while self._work.get():
            try:
                if self._is_idle(poller):
                    post(self._loop, self._take_back)
                    continue
                error = None
            except Exception as e:
                error = e
            self._close()
            post(self._loop, self._end, error)

    def _is_idle(self, poller: select.poll) -> bool:
        """Runs the steps until they are; False if they came to their end."""
        for step in self._steps:
            if step is Step.IDLE:
                return True
            if step is Step.WAIT:
                poller.poll()  # ends with the socket: who wants this to end cuts it
        return False
