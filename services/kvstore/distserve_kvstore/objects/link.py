"""The line to an object store: every call has its time, and after a failure they pause."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from distserve.errors import ConfigError, ObjectStoreDown
from distserve_kvstore.objects.runs import ObjectOptions

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger(__name__)

T = TypeVar("T")

SCHEMES = ("file", "s3", "gs", "az", "memory")
_DEBUG = "\n\nDebug source:"  # the library's errors go on for pages after it


def connect(url: str, timeout_s: float) -> ObjectStore:
    """Asks nobody yet. Raises ConfigError."""
    from obstore.store import LocalStore, from_url

    expected = ", ".join(f"{scheme}://…" for scheme in SCHEMES[:-1])
    try:
        scheme = urlsplit(url).scheme
        if scheme not in SCHEMES:
            raise ValueError("its scheme is unknown")
        if scheme == "file":
            return LocalStore(Path(unquote(urlsplit(url).path)), mkdir=True)
        if scheme == "memory":
            return from_url(url)
        # One more try within the time, for connections that the other side had closed meanwhile.
        return from_url(
            url,
            client_options={
                "allow_http": True,  # who sets an endpoint of http://, as AWS_ENDPOINT_URL, means it
                "timeout": timedelta(seconds=timeout_s),
                "connect_timeout": timedelta(seconds=min(5.0, timeout_s)),
            },
            retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=timeout_s)},
        )
    except Exception as e:  # the library has no root of its errors but BaseError, and raises others too
        raise ConfigError(
            f"kvstore.object_url {url!r} can't be used: {_short(e)}; must be one of {expected}",
            key="kvstore.object_url",
            value=url,
            expected=expected,
        ) from e


class Link:
    """Belongs to the event loop. Up, or down until a time: then one call goes through as a trial, and the rest still
    fail at once until it has come back."""

    def __init__(
        self,
        store: ObjectStore,
        url: str,
        options: ObjectOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self._url = url
        self._options = options
        self._clock = clock
        self._slots = asyncio.Semaphore(options.max_concurrent)
        self._num_failures = 0
        self._down_until = 0.0
        self._why = ""
        self._trial = False

    @property
    def state(self) -> str:
        """ "ok", or what is wrong."""
        return f"down: {self._why}" if self._num_failures else "ok"

    @property
    def down_for_s(self) -> float:
        return max(0.0, self._down_until - self._clock()) if self._num_failures else 0.0

    async def call(self, what: str, use: Callable[[ObjectStore], Awaitable[T]]) -> T:
        """What `use` returns: its turn comes within options.timeout_s, or the store is busy, and its answer within as
        much. Raises FileNotFoundError as it comes, and ObjectStoreDown for all else that the store raises."""
        self._require_up()
        try:
            async with asyncio.timeout(self._options.timeout_s):
                await self._slots.acquire()
        except TimeoutError as e:
            raise self._error("too many calls are under way", self._options.timeout_s) from e
        try:
            return await self._call(what, use)
        finally:
            self._slots.release()

    async def _call(self, what: str, use: Callable[[ObjectStore], Awaitable[T]]) -> T:
        self._require_up()  # its turn may have come because the calls before it failed
        trial = self._trial = self._num_failures > 0
        try:
            async with asyncio.timeout(self._options.timeout_s):
                result = await use(self.store)
        except FileNotFoundError:
            self._up()
            raise
        except TimeoutError as e:
            self._failed(f"no answer to {what} within {self._options.timeout_s:g} s")
            raise self._error(self._why, self.down_for_s) from e
        except Exception as e:  # see connect()
            self._failed(f"{what} fails: {_short(e)}")
            raise self._error(self._why, self.down_for_s) from e
        finally:
            if trial:
                self._trial = False
        self._up()
        return result

    def _require_up(self) -> None:
        if self._num_failures and (self._trial or self.down_for_s):
            raise self._error(self._why, self.down_for_s or self._options.timeout_s)

    def _up(self) -> None:
        if self._num_failures:
            log.warning("the object store %s answers again", self._url)
        self._num_failures, self._why = 0, ""

    def _failed(self, why: str) -> None:
        if self._num_failures and self._clock() < self._down_until:
            return  # began before the first of them failed: the pause is the same
        first, longest = self._options.backoff_s
        pause_s = min(longest, first * 2.0 ** min(self._num_failures, 16))
        self._num_failures += 1
        self._down_until = self._clock() + pause_s
        self._why = why
        log.warning("the object store %s is down, left alone for %g s: %s", self._url, pause_s, why)

    def _error(self, why: str, retry_after_s: float) -> ObjectStoreDown:
        return ObjectStoreDown(
            f"object store {self._url} is down: {why}",
            url=self._url,
            reason=why,
            retry_after_s=round(retry_after_s, 3),
        )


def _short(e: BaseException) -> str:
    text: Any = str(e) or type(e).__name__
    return str(text).partition(_DEBUG)[0].strip()
