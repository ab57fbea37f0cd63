"""Whether the fallback server's token ids mean what ours mean: found out by what it does, not by what it is called."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from distserve.errors import Unavailable
from distserve_gateway.fallback import Fallback
from distserve_gateway.fallback_body import COMPLETIONS
from distserve_gateway.first_token import refused
from distserve_gateway.tokenizing import ModelTokenizer

log = logging.getLogger(__name__)

MISSING = (404, 405, 501)  # statuses of a route that is not there
KEPT_S = 300.0  # a finding
FAILED_KEPT_S = 5.0  # that it could not be asked

# Cases in which tokenizers differ: merges, spaces, digits, case, accents and their composition, scripts, symbols, code,
# bytes of characters that no vocabulary holds, and special tokens of several families.
PROBES = (
    "The quick brown fox jumps over the lazy dog, doesn't it? ANTIDISESTABLISHMENTARIANISM unhappily.",
    "  two  spaces\tand a tab\n\n\nthree lines   \r\nand more ",
    "0 1 12 123 1234 12345 3.14159 1,000,000 0x1F 2026-11-30",
    "Ünïcödé café cafe\u0301 ﬁ naïve ½ ¼ № ™ ªº",
    "你好，世界。こんにちは 안녕하세요 Привет мир שלום مرحبا สวัสดี नमस्ते",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 𝔘𝔫𝔦 ∀x∈ℝ: ⌈x⌉ ≤ ∑ 𓀀 ꙮ",
    "def f(x: int) -> None:\n    return {'a': [x ** 2 for _ in range(10)]} != ...\n\t// <br/> $HOME && ~/.bashrc",
    "<s></s><unk><pad><|im_start|>user<|im_end|><|endoftext|><|eot_id|><|begin_of_text|>[INST][/INST]<bos><eos>",
)


class SameTokenizer:
    """Asked with the first request that needs to know, then kept for a while. All that need to know meanwhile wait for
    the one finding, which goes on without those that leave. close() ends it."""

    def __init__(
        self, fallback: Fallback, tokenizer: ModelTokenizer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fallback = fallback
        self._tokenizer = tokenizer
        self._clock = clock
        self._finding: asyncio.Task[str | Unavailable] | None = None
        self._kept_until = math.inf  # by the clock; for ever, while it is under way

    async def check(self) -> None:
        """Raises InvalidRequest if it differs, or can't give ids; Unavailable if it can't be asked."""
        finding = self._finding
        if finding is None or self._clock() >= self._kept_until:
            self._kept_until = math.inf
            finding = self._finding = asyncio.create_task(self._found(), name="same tokenizer")
        if not finding.done():
            await asyncio.wait({finding})
        found = finding.result()
        if isinstance(found, Unavailable):
            again_s = {"retry_after_s": max(self._kept_until - self._clock(), found.retry_after_s)}
            raise Unavailable(found.message, **(found.fields | again_s))
        if found:
            raise refused(f"'true', but the fallback server {found}: must be absent or 'false'")

    def close(self) -> None:
        if self._finding is not None:
            self._finding.cancel()

    async def _found(self) -> str | Unavailable:
        """The difference, in words; empty: none. Or why it could not be asked."""
        kept_s = FAILED_KEPT_S
        try:
            difference = await self._find()
            kept_s = KEPT_S
        except Unavailable as e:
            return e
        finally:
            self._kept_until = self._clock() + kept_s
        if difference:
            log.warning("X-First-Token is refused: the fallback server %s", difference)
        return difference

    async def _find(self) -> str:
        name, model = self._fallback.name, self._fallback.model
        ours = [self._tokenizer.encode(text, add_special_tokens=False) for text in PROBES]
        for text, ids in zip(PROBES, ours, strict=True):
            asked = {"model": model, "prompt": text, "add_special_tokens": False}
            try:
                theirs = _of(await self._fallback.post("/tokenize", asked), "tokens")
            except Unavailable as e:
                if e.fields.get("status") not in MISSING:
                    raise
                return f"{name} has no /tokenize, by which it would show that it has the same tokenizer"
            if theirs != ids:
                return f"{name} has another tokenizer: it has other ids for {text[:24]!r}"
        asked_for_one = {"model": model, "prompt": ours[0], "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        choices = _of(await self._fallback.post(COMPLETIONS, asked_for_one), "choices")
        if not (isinstance(choices, list) and choices and _of(choices[0], "token_ids")):
            return f"{name} gives no ids of the tokens that it draws (return_token_ids)"
        return ""


def _of(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None
