"""Bodies to Calls: decoding, validation, chat template and tokenising. The same for both doors."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from distserve.api_keys import ApiKey
from distserve.config import SloConfig
from distserve.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, UnsupportedFeature
from distserve.messages import SamplingParams
from distserve_gateway import messages_text
from distserve_gateway.admission import Admission
from distserve_gateway.calls import Call, Kind, Prompt
from distserve_gateway.chat_template import ChatTemplate
from distserve_gateway.decoding import decode_body
from distserve_gateway.envelope import NONE, Envelope
from distserve_gateway.identity import cache_salt, conversation
from distserve_gateway.keys import OPEN
from distserve_gateway.params import (
    RANGES,
    Range,
    check_logprobs,
    check_token_ids,
    checked,
    sampling_params,
    stop_strings,
    traffic_class,
)
from distserve_gateway.schema import ChatBody, CompletionBody, GenerateBody, SampledBody, TokenizeBody
from distserve_gateway.terms import terms_of
from distserve_gateway.tokenizing import ModelTokenizer

DEFAULT_COMPLETION_TOKENS = 16
LOGPROB_BYTES = 14  # of one (token id, logprob) pair in a message, about

OnWork = Callable[[], None]


def _untold() -> None:
    """Nobody asks."""


class Intake:
    """`context_length()` is the longest sequence that the workers of the moment take, in tokens; `max_payload_bytes()`
    the largest message of the bus. `slo`: what holds for requests that neither say more nor have a key that does.
    `envelope` and `key`, where they are taken: what came beside the body, and whose request it is; `on_work` is called
    before a text is rendered or tokenised, when all else that can be looked at before is in order."""

    def __init__(
        self,
        model: str,
        tokenizer: ModelTokenizer,
        template: ChatTemplate | None,
        admission: Admission,
        context_length: Callable[[], int],
        max_payload_bytes: Callable[[], int],
        *,
        slo: SloConfig | None = None,
        stream_by_default: bool = False,
    ) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._template = template
        self._admission = admission
        self.context_length = context_length
        self.max_payload_bytes = max_payload_bytes
        self._slo = slo or SloConfig()
        self._stream_by_default = stream_by_default

    async def completion(
        self, data: bytes, envelope: Envelope = NONE, key: ApiKey = OPEN, on_work: OnWork = _untold
    ) -> Call:
        body = decode_body(CompletionBody, data)
        self.check_model(body.model, key)
        if body.logprobs is not None:
            check_logprobs("logprobs", body.logprobs)
        max_tokens = body.max_tokens
        if max_tokens is not None:
            Range(0 if body.echo else 1, RANGES["max_tokens"].high).check("max_tokens", max_tokens)
        call, sampling = self._draft("completion", body, body.logprobs, envelope, key, echo=bool(body.echo))
        prompts = await self._prompts(body.prompt, call.n, on_work)
        return self._call(call, sampling, prompts, max_tokens, DEFAULT_COMPLETION_TOKENS)

    async def generate(
        self, data: bytes, envelope: Envelope = NONE, key: ApiKey = OPEN, on_work: OnWork = _untold
    ) -> Call:
        body = decode_body(GenerateBody, data)
        self.check_model(body.model, key)
        if body.n not in (None, 1):
            raise UnsupportedFeature(f"n is {body.n}: /generate gives one output, use /v1/completions", param="n")
        max_tokens = checked(body, "max_tokens", None)
        prompt = body.prompt
        call, sampling = self._draft("generate", body, None, envelope, key)
        prompts = await self._prompts(list(prompt) if isinstance(prompt, list) else prompt, 1, on_work)
        return self._call(call, sampling, prompts, max_tokens, DEFAULT_COMPLETION_TOKENS)

    async def chat(self, data: bytes, envelope: Envelope = NONE, key: ApiKey = OPEN, on_work: OnWork = _untold) -> Call:
        body = decode_body(ChatBody, data)
        self.check_model(body.model, key)
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise InvalidRequest(
                f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}, "
                "must be equal, or give one",
                param="max_completion_tokens",
                value=body.max_completion_tokens,
            )
        max_tokens = body.max_tokens
        param = "max_tokens"
        if max_tokens is None:
            max_tokens, param = body.max_completion_tokens, "max_completion_tokens"
        if max_tokens is not None:
            RANGES["max_tokens"].check(param, max_tokens)
        num_logprobs = None
        if body.logprobs:
            num_logprobs = check_logprobs("top_logprobs", body.top_logprobs or 0)
        elif body.top_logprobs:
            raise InvalidRequest(
                f"top_logprobs is {body.top_logprobs} without logprobs, must come with logprobs: true",
                param="top_logprobs",
                value=body.top_logprobs,
            )
        call, sampling = self._draft("chat", body, num_logprobs, envelope, key)
        self._admission.check_size(1, call.n)
        on_work()
        text = self.chat_text(body)
        [ids] = await self._tokenizer.encode_off_loop([text], add_special_tokens=False)
        return self._call(call, sampling, [(ids, text)], max_tokens, None)

    def chat_text(self, body: ChatBody | TokenizeBody) -> str:
        """The prompt that the messages make."""
        if self._template is None:
            raise InvalidRequest(f"model {self.model!r} has no chat template, use /v1/completions", param="messages")
        add_generation_prompt = body.add_generation_prompt is not False
        return self._template.render(
            messages_text.plain(body.messages),
            add_generation_prompt=add_generation_prompt,
            variables=body.chat_template_kwargs,
        )

    async def tokenize(self, body: TokenizeBody, key: ApiKey) -> list[int]:
        """Raises what admission raises: it does a request's work on its way in."""
        self.check_model(body.model, key)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        with self._admission.entering():
            text = self.chat_text(body) if body.prompt is None else body.prompt
            special = body.add_special_tokens if body.add_special_tokens is not None else body.prompt is not None
            [ids] = await self._tokenizer.encode_off_loop([text], add_special_tokens=special)
        return ids

    def check_model(self, model: str | None, key: ApiKey) -> None:
        """Raises ModelNotFound, also if the key may not use it; absent means the one that is served."""
        if not key.may_use(self.model):
            raise ModelNotFound(
                f"model {model or self.model!r} does not exist, or API key {key.name!r} may not use it",
                param="model",
                value=model,
            )
        if model is not None and model != self.model:
            raise ModelNotFound(
                f"model {model!r} does not exist, must be {self.model!r}",
                param="model",
                value=model,
                expected=self.model,
            )

    async def _prompts(
        self, prompt: str | Sequence[str | int | list[int]] | None, n: int, on_work: OnWork
    ) -> list[tuple[list[int], str | None]]:
        """The four forms: a string, strings, token ids, lists of token ids. Of each prompt n outputs will be asked."""
        if prompt is None:
            raise InvalidRequest("prompt is missing", param="prompt")
        if isinstance(prompt, str):
            prompt = [prompt]
        if not prompt:
            raise InvalidRequest("prompt is [], must hold at least one prompt or token", param="prompt", value="[]")
        kinds = {type(part) for part in prompt}
        if len(kinds) > 1:
            raise InvalidRequest(
                "prompt mixes strings, token ids and lists, must be one of: string, strings, ids, lists of ids",
                param="prompt",
            )
        self._admission.check_size(1 if kinds == {int} else len(prompt), n)
        if kinds == {int}:
            ids = [part for part in prompt if isinstance(part, int)]
            check_token_ids("prompt", ids, self._tokenizer.vocab_size)
            return [(ids, None)]
        if kinds == {str}:
            on_work()
            texts = [part for part in prompt if isinstance(part, str)]
            encoded = await self._tokenizer.encode_off_loop(texts, add_special_tokens=True)
            return list(zip(encoded, texts, strict=True))
        lists = [part for part in prompt if isinstance(part, list)]
        for i, ids in enumerate(lists):
            check_token_ids(f"prompt[{i}]", ids, self._tokenizer.vocab_size)
        return [(ids, None) for ids in lists]

    def _check_prompt_logprobs(self, num_tokens: int, top_n: int) -> None:
        """A prompt's logprobs come in one message. Raises InvalidRequest if they would take more than half of what one
        may have; the rest is for what else is in it."""
        limit = self.max_payload_bytes() // 2
        size = num_tokens * (top_n + 1) * LOGPROB_BYTES
        if size <= limit:
            return
        most = limit // (num_tokens * LOGPROB_BYTES) - 1
        would_do = f"logprobs of at most {most}, or " if most >= 0 else ""
        raise InvalidRequest(
            f"logprobs is {top_n} with echo of {num_tokens} prompt tokens, about {size} bytes of logprobs, must be at "
            f"most {limit}: ask for {would_do}a prompt of at most {limit // ((top_n + 1) * LOGPROB_BYTES)} tokens",
            param="logprobs",
            value=top_n,
            expected=f"<= {most}" if most >= 0 else "none",
        )

    def _draft(
        self,
        kind: Kind,
        body: SampledBody,
        num_logprobs: int | None,
        envelope: Envelope,
        key: ApiKey,
        *,
        echo: bool = False,
    ) -> tuple[Call, SamplingParams]:
        """All that can be said, and refused, before its prompts are looked at: a call without any, and their sampling
        but for max_tokens."""
        terms = terms_of(body, envelope, key, self._slo)
        options = body.stream_options
        stream = self._stream_by_default if body.stream is None else body.stream
        if options is not None and not stream:
            raise InvalidRequest("stream_options is given without stream: true", param="stream_options")
        sampling = sampling_params(body, vocab_size=self._tokenizer.vocab_size)
        prefix = {"chat": "chatcmpl", "completion": "cmpl", "generate": "gen"}[kind]
        call = Call(
            request_id=f"{prefix}-{secrets.token_hex(12)}",
            kind=kind,
            model=self.model,
            created=int(time.time()),
            prompts=[],
            n=checked(body, "n", 1),
            stops=stop_strings(body),
            num_logprobs=num_logprobs,
            echo=echo,
            skip_special_tokens=body.skip_special_tokens is not False,
            stream=stream,
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
            timings=bool(body.timings),
            token_ids=bool(body.return_token_ids),
            traffic_class=traffic_class(body, terms.priority),
            cache_salt=cache_salt(body, key),
            conversation=conversation(body, envelope.session_id),
            terms=terms,
        )
        prompt_logprobs = num_logprobs if echo else None
        return call, msgspec.structs.replace(sampling, logprobs=num_logprobs, prompt_logprobs=prompt_logprobs)

    def _call(
        self,
        draft: Call,
        sampling: SamplingParams,
        prompts: Sequence[tuple[list[int], str | None]],
        max_tokens: int | None,
        default_max_tokens: int | None,
    ) -> Call:
        whole = [self._prompt(ids, text, max_tokens, default_max_tokens, sampling) for ids, text in prompts]
        return replace(draft, prompts=whole)

    def _prompt(
        self, ids: list[int], text: str | None, max_tokens: int | None, default: int | None, sampling: SamplingParams
    ) -> Prompt:
        limit = self.context_length()
        if not ids:
            raise InvalidRequest("the prompt has no tokens, must have at least one", param="prompt", value="")
        # A default fills what room there is; what the user asked for is never cut.
        room = limit - len(ids)
        wanted = max_tokens if max_tokens is not None else max(1, room if default is None else min(default, room))
        if max(wanted, 1) > room:
            raise ContextLengthExceeded(
                f"the prompt has {len(ids)} tokens and max_tokens is {wanted}, together {len(ids) + wanted}: "
                f"the limit of {self.model!r} is {limit} tokens",
                param="messages" if default is None else "prompt",
                num_prompt_tokens=len(ids),
                max_tokens=wanted,
                limit=limit,
            )
        if sampling.prompt_logprobs is not None:
            self._check_prompt_logprobs(len(ids), sampling.prompt_logprobs)
        if sampling.min_tokens > wanted:
            raise InvalidRequest(
                f"min_tokens is {sampling.min_tokens}, must be at most max_tokens, {wanted}",
                param="min_tokens",
                value=sampling.min_tokens,
            )
        return Prompt(ids, msgspec.structs.replace(sampling, max_tokens=max(wanted, 1)), wanted, text)
