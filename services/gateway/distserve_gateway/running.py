"""The requests that run on this gateway, by the names under which they may be ended before their time: the answer's id,
and what its asker calls it (X-Request-Id).

A caller sees and ends its own alone: others' requests are not there for it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal

from distserve.errors import DeadlineExceeded, DistServeError
from distserve.messages import StopReply
from distserve_gateway.calls import Call


class Run:
    """One request from when its terms are known to its end, whoever carries it at the moment: its start, then its
    answer. cancel() ends it at any stage, as its deadline does; who carries it raises the error."""

    __slots__ = (
        "_abort",
        "_num_tokens",
        "_on_close",
        "_scope",
        "_timer",
        "call",
        "closed",
        "error",
        "own_id",
    )

    def __init__(self, call: Call, own_id: str = "", on_close: "Callable[[Run], None]" = lambda run: None) -> None:
        self.call = call
        self.own_id = own_id
        self.closed = False
        self.error: DistServeError | None = None  # why it ends early
        self._on_close = on_close
        self._scope: asyncio.Timeout | None = None
        self._abort: Callable[[DistServeError], bool] | None = None
        self._num_tokens = _none
        self._timer: asyncio.TimerHandle | None = None
        if (deadline_s := call.terms.deadline_s) is not None:
            late = DeadlineExceeded(f"the answer was not complete within {deadline_s:g} s, the request's deadline")
            left_s = max(0.0, call.received_at + deadline_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(left_s, self.cancel, late)

    @property
    def state(self) -> Literal["starting", "running"]:
        return "starting" if self._abort is None else "running"

    @property
    def num_output_tokens(self) -> int:
        return self._num_tokens()

    def description(self) -> dict[str, str | int]:
        """For its owner."""
        return {
            "id": self.call.request_id,
            "object": "request",
            "request_id": self.own_id,
            "created": self.call.created,
            "state": self.state,
            "num_outputs": self.call.num_outputs,
            "num_output_tokens": self.num_output_tokens,
        }

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """What is awaited inside is cancelled when the request is. Raises the error then, also if it came too late to
        be noticed inside."""
        if self.error is not None:
            raise self.error
        try:
            async with asyncio.timeout(None) as self._scope:
                yield
        except TimeoutError:
            if self.error is None:
                raise
        finally:
            self._scope = None
        if self.error is not None:
            raise self.error

    def carried_by(self, abort: Callable[[DistServeError], bool], num_tokens: Callable[[], int]) -> None:
        """From now on `abort` ends it, unless it says that all of it is there; `num_tokens` counts its output so far.
        Raises the error if it was cancelled meanwhile."""
        if self.error is not None:
            raise self.error
        self._abort, self._num_tokens = abort, num_tokens

    def cancel(self, error: DistServeError) -> bool:
        """End it with this error. False, and no effect, if it has come to an end, or an earlier error ends it."""
        if self.closed or self.error is not None:
            return False
        if self._abort is not None:
            if self._abort(error):
                self.error = error
            return self.error is not None
        self.error = error
        if self._scope is not None:
            self._scope.reschedule(0.0)
        return True

    def close(self) -> None:
        """It has ended. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._abort, self._num_tokens = None, _none  # so that no cycle keeps the prompt
        self._on_close(self)


def _none() -> int:
    return 0


class Running:
    """Belongs to the event loop. An answer's id is of one request; of an asker's own name there may be several."""

    def __init__(self) -> None:
        self._by_id: dict[str, Run] = {}
        self._by_own_id: dict[tuple[str, str], dict[Run, None]] = {}  # (tenant, own id)

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, call: Call, own_id: str = "") -> Run:
        """It runs from now on, until Run.close()."""
        run = self._by_id[call.request_id] = Run(call, own_id, self._forget)
        if own_id:
            self._by_own_id.setdefault((call.terms.tenant, own_id), {})[run] = None
        return run

    def _forget(self, run: Run) -> None:
        del self._by_id[run.call.request_id]
        if run.own_id:
            key = run.call.terms.tenant, run.own_id
            del self._by_own_id[key][run]
            if not self._by_own_id[key]:
                del self._by_own_id[key]

    def of(self, tenant: str) -> list[Run]:
        """A caller's, oldest first."""
        return [run for run in self._by_id.values() if run.call.terms.tenant == tenant]

    def is_id(self, tenant: str, name: str) -> bool:
        """Whether an answer of that caller's has this id: then no other gateway has one."""
        run = self._by_id.get(name)
        return run is not None and run.call.terms.tenant == tenant

    def stop(self, tenant: str, name: str, error: DistServeError) -> StopReply:
        """End all of a caller's requests of that name."""
        runs = dict(self._by_own_id.get((tenant, name), {}))
        if self.is_id(tenant, name):
            runs[self._by_id[name]] = None
        stopped = StopReply()
        for run in runs:
            its = StopReply(num_requests=1, num_outputs=run.call.num_outputs, num_output_tokens=run.num_output_tokens)
            if run.cancel(error):
                stopped = stopped.plus(its)
        return stopped
