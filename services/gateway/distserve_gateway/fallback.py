"""The fallback server: an OpenAI-compatible one that requests go to while first tokens here are late."""

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from distserve.config import BreakerConfig
from distserve.errors import ConfigError, DistServeError, Field, Unavailable
from distserve_gateway.admission import Admission
from distserve_gateway.envelope import HEADERS
from distserve_gateway.fallback_chunk import Chunk, decoder
from distserve_gateway.running import Run
from distserve_gateway.sse import Events

log = logging.getLogger(__name__)

MAX_ERROR_BYTES = 64 * 1024
MAX_SHOWN = 200  # characters of what it says
TELLING = (400, 404, 413, 422)  # statuses whose message is about the request; others may be about our key

_EMPTY = "ended its answer before it began"
_KEY = re.compile(r"[\x21-\x7e]*")


@dataclass(frozen=True, slots=True)
class Limits:
    """`first_byte_s`: from the request to the first chunk; `silence_s`: between two of its bytes after that;
    `question_s`: for a whole answer to what the gateway itself asks."""

    first_byte_s: float = 60.0
    silence_s: float = 30.0
    question_s: float = 2.0
    write_s: float = 10.0


class Fallback:
    """`async with` it. Owns the connections, and the tasks of requests that run there; both end with it.
    Raises ConfigError, which repeats neither URL nor key: both may hold secrets."""

    def __init__(
        self, config: BreakerConfig, served_name: str, admission: Admission, limits: Limits | None = None
    ) -> None:
        if not _KEY.fullmatch(config.fallback_key):
            raise ConfigError(
                "breaker.fallback_key has a space or what is not ASCII, must be as the server takes it, without Bearer",
                key="breaker.fallback_key",
            )
        try:
            url = httpx.URL(config.fallback_url.rstrip("/").removesuffix("/v1"))
        except httpx.InvalidURL:
            expected = "http://HOST:PORT or https://…, without /v1"
            raise ConfigError(
                f"breaker.fallback_url is no URL, must be {expected}", key="breaker.fallback_url", expected=expected
            ) from None
        self.name = f"{url.host}:{url.port}" if url.port else url.host  # without what may be secret in the URL
        self.model = config.fallback_model or served_name
        self._admission = admission
        self._limits = limits or Limits()
        self._connect_timeout_s = config.connect_timeout_s
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"accept-encoding": "identity", HEADERS["first_token"]: "false"}  # it sends nothing on in its turn
            | ({"authorization": f"Bearer {config.fallback_key}"} if config.fallback_key else {}),
            timeout=httpx.Timeout(
                None, connect=config.connect_timeout_s, pool=config.connect_timeout_s, write=self._limits.write_s
            ),
            # A connection a request: none is used in the moment in which the server closes it, and the pool's books,
            # which cost the square of the idle ones, stay short.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self._tasks: dict[asyncio.Task[None], Run] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        for task in self._tasks:
            if not task.cancelling():  # a second cancel would interrupt the closing of its connection
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    # ------------------------------------------------------------ what runs there

    def begin(self, run: Run, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task of its own, of a request. Cancelled, it closes its connection, by which the server sees it."""
        task = asyncio.create_task(work, name="fallback")
        self._tasks[task] = run
        task.add_done_callback(self._tasks.pop)
        return task

    @property
    def num_outputs(self) -> int:
        """That run there now."""
        return sum(run.call.num_outputs for run in self._tasks.values())

    async def drain(self, grace_s: float, error: DistServeError) -> bool:
        """Let what runs there finish within grace_s, and end the rest with `error`. True if none was ended."""
        if not self._tasks:
            return True
        await asyncio.wait(self._tasks, timeout=max(0.0, grace_s))
        left = list(self._tasks.values())
        for run in left:
            run.cancel(error)
        return not left

    # ------------------------------------------------------------ requests

    def admit(self, num_outputs: int) -> None:
        """Raises Draining, or Overloaded: it runs as many for this gateway as may run here."""
        self._admission.check(num_outputs, self.num_outputs)

    async def stream(
        self,
        path: str,
        body: bytes,
        request_id: str,
        take: Callable[[Chunk], None],
        trace: Mapping[str, str] | None = None,
    ) -> None:
        """Every chunk of the answer to `take`, until its end. `trace`: headers that name our span. Raises Unavailable,
        which names the server."""
        clock = asyncio.get_running_loop().time
        headers = {"content-type": "application/json", "accept": "text/event-stream", "x-request-id": request_id}
        headers |= trace or {}
        events, num_chunks = Events(), 0
        try:
            async with asyncio.timeout(self._limits.first_byte_s) as limit:
                async with self._client.stream("POST", path, content=body, headers=headers) as response:
                    await self._check(response, "text/event-stream")
                    async for received in response.aiter_raw():
                        for event in events.feed(received):
                            if event == b"[DONE]":
                                if num_chunks:
                                    return
                                raise self.unavailable(_EMPTY)
                            take(self._chunk(event))
                            num_chunks += 1
                        if num_chunks:
                            limit.reschedule(clock() + self._limits.silence_s)
                    if not num_chunks:
                        raise self.unavailable(_EMPTY)
        except TimeoutError:
            first_s, silence_s = self._limits.first_byte_s, self._limits.silence_s
            late = f"was silent for {silence_s:g} s" if num_chunks else f"gave nothing within {first_s:g} s"
            raise self.unavailable(late) from None
        except (httpx.HTTPError, msgspec.DecodeError, ValueError) as e:
            raise self._translated(e) from e

    async def post(self, path: str, value: Any) -> Any:
        """The JSON that it answers to `value`. Raises Unavailable."""
        headers = {"content-type": "application/json"}
        try:
            async with asyncio.timeout(self._limits.question_s):
                async with self._client.stream(
                    "POST", path, content=msgspec.json.encode(value), headers=headers
                ) as response:
                    await self._check(response, "application/json")
                    return msgspec.json.decode(await response.aread())
        except TimeoutError:
            raise self.unavailable(f"gave no answer within {self._limits.question_s:g} s") from None
        except (httpx.HTTPError, msgspec.DecodeError, ValueError) as e:
            raise self._translated(e) from e

    def _chunk(self, event: bytes) -> Chunk:
        chunk = decoder.decode(event)
        if chunk.error is not None:
            log.warning("the fallback server %s: %s", self.name, chunk.error)
            raise self.unavailable(f"ended the answer with an error: {_message(event)}")
        return chunk

    async def _check(self, response: httpx.Response, content_type: str) -> None:
        """Raises Unavailable for what is no answer."""
        status = response.status_code
        if status == 200:
            given = response.headers.get("content-type", "").partition(";")[0].strip().lower()
            if given != content_type:
                raise self.unavailable(f"answered {given or 'without a content-type'}, must be {content_type}")
            return
        said = b""
        async for received in response.aiter_raw():
            said += received
            if len(said) > MAX_ERROR_BYTES:
                break
        message = _message(said) if status in TELLING else ""
        problem = f"answered {status}" + (f": {message}" if message else "")
        log.warning("the fallback server %s %s", self.name, problem)
        retry_after = response.headers.get("retry-after", "")
        raise self.unavailable(problem, float(retry_after) if retry_after.isdigit() else 1.0, status=status)

    def _translated(self, error: Exception) -> Unavailable:
        if isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout):
            return self.unavailable(f"can't be reached within {self._connect_timeout_s:g} s")
        if isinstance(error, httpx.ConnectError):
            return self.unavailable(f"can't be reached: {error}")
        if isinstance(error, httpx.HTTPError):
            return self.unavailable(f"broke off: {error or type(error).__name__}")
        return self.unavailable(f"says what is no answer: {error}")

    def unavailable(self, problem: str, retry_after_s: float = 1.0, **fields: Field) -> Unavailable:
        """It, in one error: `problem` says what it does."""
        said = f"the fallback server {self.name} {problem}"
        return Unavailable(said, retry_after_s=retry_after_s, fallback=self.name, **fields)


def _message(said: bytes) -> str:
    """Of an error's body: OpenAI's shape, else as it is. Cut."""
    try:
        error = msgspec.json.decode(said)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        text = said.decode("utf-8", "replace").strip()
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"
