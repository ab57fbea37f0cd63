"""The one thread that owns the devices of a sender or receiver: it posts, polls completions and keeps the timers.

It sleeps in poll() on the completion channels' descriptors, with the GIL released, or, if a core is given for it,
polls there without sleeping. The way to sleep without missing a completion is that of ibv_get_cq_event(3): poll until
empty, ask for an event, poll once more, sleep.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from distserve.errors import TransportUnavailable
from distserve.transport.rdma.device import Completion, Nic

log = logging.getLogger(__name__)

T = TypeVar("T")

CALLS_A_TURN = 64  # then completions are looked at again, however much more there is to do


class Timer:
    """Runs once, unless cancelled before. For the reactor's thread."""

    __slots__ = ("cancelled", "run")

    def __init__(self, run: Callable[[], object]) -> None:
        self.run = run
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Reactor:
    """Owns `nics` from the first to the last: opened by `open_nics` on the thread, closed there by stop().

    `on_completion(nic_index, completion)` is called on the thread, as is everything given to call() and later().
    `on_crash(error)` too, last of all, if a device cannot be asked any more: its links have then failed.
    """

    def __init__(
        self,
        name: str,
        open_nics: Callable[[], Sequence[Nic]],
        on_completion: Callable[[int, Completion], None],
        *,
        on_crash: Callable[[Exception], None],
        poll_cpu: int | None = None,
    ) -> None:
        self.nics: Sequence[Nic] = ()
        self._open_nics = open_nics
        self._on_completion = on_completion
        self._on_crash = on_crash
        self._poll_cpu = poll_cpu
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Timer]] = []
        self._serial = itertools.count()
        self._stopping = False
        self._lock = threading.Lock()  # between call() and the end: nothing may be put that nobody runs
        self._ended = False
        self._wake = -1
        self._opened: Future[None] = Future()
        self._finished: Future[None] = Future()
        self._awake = False  # the thread is known to look at the inbox before it sleeps
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # -- from any thread

    def start(self) -> Future[None]:
        """Starts the thread. The result comes when the devices are open; it raises what opening them raised."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for future in (self._opened, self._finished):
            future.set_running_or_notify_cancel()  # from here on nobody who waits for it can cancel it
        self._thread.start()
        return self._opened

    def call(self, run: Callable[[], object]) -> bool:
        """Runs it on the thread, after all that was given before. False if the thread has ended."""
        with self._lock:
            if self._ended:
                return False
            self._inbox.put(run)
            if not self._awake:
                self._awake = True
                os.eventfd_write(self._wake, 1)
        return True

    async def run(self, run: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """The result of calling it on the thread. Raises TransportUnavailable if the thread has ended. If the caller
        is cancelled while it runs, `undo` gets the result, on the thread."""
        result: Future[T] = Future()

        def call() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(run())
            except BaseException as e:
                result.set_exception(e)

        if not self.call(call):
            raise TransportUnavailable("this transport has stopped", kind="rdma")
        try:
            return await asyncio.wrap_future(result)
        except asyncio.CancelledError:
            if undo is not None and not result.cancelled():
                self.call(lambda: None if result.exception() else undo(result.result()))
            raise

    async def stop(self) -> None:
        """Runs what was given before, closes the devices and ends the thread. Idempotent."""
        if self._thread.ident is None:
            return

        def end() -> None:
            self._stopping = True

        self.call(end)
        await asyncio.wrap_future(self._finished)
        self._thread.join()  # it has nothing left to do but return

    # -- on the thread

    def later(self, delay_s: float, run: Callable[[], object]) -> Timer:
        timer = Timer(run)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._serial), timer))
        return timer

    def _run(self) -> None:
        try:
            self.nics = tuple(self._open_nics())
            if self._poll_cpu is not None:
                os.sched_setaffinity(0, {self._poll_cpu})  # of this thread alone
        except BaseException as e:
            self._opened.set_exception(e)
            self._end()
            return
        self._opened.set_result(None)
        try:
            self._serve()
        except Exception as e:
            log.exception("the %s thread ends: a device cannot be used any more", self._thread.name)
            crash = e
            self._guarded(lambda: self._on_crash(crash))
        self._end()

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        for nic in self.nics:
            poller.register(nic.fd, select.POLLIN)
        while not self._stopping:
            if self._turn() or self._poll_cpu is not None:
                continue
            for nic in self.nics:
                nic.arm()
            if self._turn() or not self._may_sleep():
                continue
            poller.poll(self._patience_ms())
            self._awake = True
        self._turn()

    def _turn(self) -> bool:
        """Whatever is there now. True if there was something."""
        busy = False
        for _ in range(CALLS_A_TURN):
            try:
                run = self._inbox.get_nowait()
            except queue.Empty:
                break
            busy = True
            self._guarded(run)
        while self._timers and (self._timers[0][2].cancelled or self._timers[0][0] <= time.monotonic()):
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled:
                busy = True
                self._guarded(timer.run)
        for index, nic in enumerate(self.nics):
            for completion in nic.poll():
                busy = True
                self._guarded(lambda i=index, c=completion: self._on_completion(i, c))  # type: ignore[misc]
        return busy

    def _may_sleep(self) -> bool:
        """From here on call() wakes us; False if something came before."""
        with self._lock:
            self._awake = False
            if not self._inbox.empty():
                self._awake = True
                return False
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass
        # A call() between the two above has put its work in the inbox and its wake may just have been eaten.
        with self._lock:
            if self._inbox.empty():
                return not self._stopping
            self._awake = True
            return False

    def _patience_ms(self) -> float | None:
        if not self._timers:
            return None
        return max(0.0, (self._timers[0][0] - time.monotonic()) * 1000)

    def _guarded(self, run: Callable[[], Any]) -> None:
        try:
            run()
        except Exception:
            log.exception("on the %s thread", self._thread.name)

    def _end(self) -> None:
        with self._lock:
            self._ended = True
        while True:  # nobody adds any more; what came last still runs, so that nobody waits for ever
            try:
                self._guarded(self._inbox.get_nowait())
            except queue.Empty:
                break
        for nic in self.nics:
            self._guarded(nic.close)
        os.close(self._wake)
        self._finished.set_result(None)
