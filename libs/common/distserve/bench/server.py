"""The server under load, before the load: what it is, which fields it takes, how it counts tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from distserve.bench.answers import Result, error_text, result
from distserve.bench.body import PATHS, Form
from distserve.bench.client import Pool
from distserve.bench.errors import BadOption
from distserve.bench.prompts import ANCHOR, UNCHECKED, Count, Words, learn
from distserve.bench.traffic import Ask
from distserve.bench.words import CANDIDATES
from distserve.errors import InvalidRequest, Unavailable

LOOK_S = 10.0  # for what takes a server no work
PROBE_S = 120.0  # for a first answer: a server may still be warming up
MANY_ASKS, FEW_ASKS = 400, 60

# What a server may not know, in the order in which it is left out until an answer comes.
_LADDER: tuple[tuple[str, ...], ...] = (
    (),
    ("continuous_usage_stats",),
    ("ignore_eos",),
    ("max_tokens",),
    ("stream_options",),
    ("temperature",),
)
_HINTS = {401: "; give --api-key", 403: "; give another --api-key", 404: "; see --model and --endpoint"}
_PROBE = Ask(0, 0.0, 1, 4, "probe")


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`facts`: what it says of itself, by where it says it. `dropped`: fields that it refuses."""

    url: str
    endpoint: str
    model: str
    facts: dict[str, Any]
    dropped: list[str]
    lengths_by: str


class Target:
    """One server, its connections, and the form of requests to it."""

    def __init__(self, pool: Pool, form: Form) -> None:
        self.pool = pool
        self.form = form
        self.words: Words | None = None
        self._facts: dict[str, Any] = {}
        self._refused: dict[str, str] = {}  # path -> what it said to our key

    def info(self) -> ServerInfo:
        assert self.words is not None
        return ServerInfo(
            url=self.form.address.url,
            endpoint=PATHS[self.form.endpoint],
            model=self.form.model,
            facts=self._facts,
            dropped=sorted(self.form.dropped),
            lengths_by=self.words.source,
        )

    async def look(self) -> None:
        """Its facts, and its model where none was named. Raises Unavailable, BadOption."""
        url = self.form.address.url
        listed = await self._get("/v1/models")
        cards = listed.get("data") if isinstance(listed, dict) else None
        names = [str(card.get("id")) for card in cards or [] if isinstance(card, dict)]
        if not self.form.model:
            if not names and (refused := self._refused.get("/v1/models")):
                raise Unavailable(f"{url} {refused}")
            if not names:
                raise BadOption("--model", "", f"name one: {url} does not list any at /v1/models")
            self.form = replace(self.form, model=names[0])
        for card in cards or []:
            if isinstance(card, dict) and card.get("id") == self.form.model:
                self._facts["model"] = {k: v for k, v in card.items() if isinstance(v, str | int | float)}
        for path in ("/version", "/health"):
            if isinstance(found := await self._get(path), dict):
                self._facts[path] = found

    async def settle(self) -> None:
        """Ask one small question, leaving out more and more until the server answers, then putting back each field that
        it does not mind. Raises Unavailable, InvalidRequest."""
        for names in _LADDER:
            if names and not set(names) - set(self.form.extra):
                continue
            self.form = self.form.without(*names)
            found = await self._probe(self.form)
            if found.ok:
                await self._put_back(needed=names)
                return
            if found.status not in (400, 422):
                break
        url, path = self.form.address.url, PATHS[self.form.endpoint]
        what = f"{url}{path} did not answer a first small request: {found.kind}: {found.detail or 'no text'}"
        if found.status in (400, 422):
            raise InvalidRequest(what)
        raise Unavailable(what + _HINTS.get(found.status, ""))

    async def _put_back(self, needed: Sequence[str]) -> None:
        """`needed`: left out last, without which there was no answer."""
        for name in (name for names in reversed(_LADDER) for name in names):
            if name in needed or name not in self.form.dropped:
                continue
            form = replace(self.form, dropped=self.form.dropped - {name})
            if _probe_body(form) == _probe_body(self.form) or (await self._probe(form)).ok:
                self.form = form

    async def _probe(self, form: Form) -> Result:
        data = form.post(PATHS[form.endpoint], _probe_body(form))
        return result(_PROBE, await self.pool.ask(data, PROBE_S), due_s=0.0, began_s=0.0)

    async def measure_words(self, tokenizer: Path | None, among: Sequence[str] = CANDIDATES) -> None:
        """Find `words`: by a tokenizer's folder if one is named, else by the server. Raises BadOption."""
        if tokenizer is not None:
            count = local_counter(tokenizer)
            words = await learn(count, f"by the tokenizer in {tokenizer}", MANY_ASKS, among)
            if words.is_exact and (told := await self._usage(" ".join([ANCHOR, words.words[0]]))) is not None:
                words = Words(words.words, told - 1, words.source + "; the template's part from the server's usage")
        else:
            words = await learn(self._tokenize, "by the server's /tokenize", MANY_ASKS, among)
            if words is UNCHECKED:
                words = await learn(self._usage, "by the server's usage.prompt_tokens", FEW_ASKS, among)
        self.words = words

    async def _get(self, path: str) -> Any:
        """The document there; None if there is none. Raises Unavailable if nobody answers."""
        exchange = await self.pool.ask(self.form.get(path), LOOK_S)
        if exchange.error is not None:
            kind, text = exchange.error
            raise Unavailable(f"{self.form.address.url} does not answer GET {path}: {kind}: {text}")
        if name := exchange.reading.headers.get("server"):
            self._facts["server header"] = name
        status, content = exchange.reading.status, exchange.reading.content()
        if status in (401, 403):
            said = error_text(content)[:300] or "no text"
            self._refused[path] = f"answers GET {path} with {status}: {said}{_HINTS[status]}"
        try:
            return msgspec.json.decode(content) if status in (200, 503) else None
        except ValueError:
            return None

    async def _post(self, path: str, body: Mapping[str, Any], deadline_s: float) -> Any:
        exchange = await self.pool.ask(self.form.post(path, body), deadline_s)
        if exchange.error is not None or exchange.reading.status != 200:
            return None
        try:
            return msgspec.json.decode(exchange.reading.content())
        except ValueError:
            return None

    async def _tokenize(self, text: str) -> int | None:
        found = await self._post("/tokenize", {"model": self.form.model, **self.form.prompt(text)}, LOOK_S)
        count = found.get("count") if isinstance(found, dict) else None
        return count if isinstance(count, int) else None

    async def _usage(self, text: str) -> int | None:
        found = await self._post(PATHS[self.form.endpoint], self.form.body(text, 1, stream=False), PROBE_S)
        usage = found.get("usage") if isinstance(found, dict) else None
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        return count if isinstance(count, int) else None


def _probe_body(form: Form) -> dict[str, Any]:
    return form.body(f"{ANCHOR} on", _PROBE.num_output)


def local_counter(folder: Path) -> Count:
    """Counts by a folder's tokenizer.json, without a chat template. Raises BadOption."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise BadOption("--tokenizer", folder, "it needs tokenizers: pip install 'distserve[gateway]'") from None
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as e:  # the library raises bare ones
        raise BadOption("--tokenizer", folder, f"its tokenizer.json can't be read: {e}") from None

    async def count(text: str) -> int | None:
        return len(tokenizer.encode(text).ids)

    return count
