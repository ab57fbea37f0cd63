"""Sampling fields of a body, checked, to SamplingParams. All ranges are in one table."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from distserve.api_keys import MAX_SLO_MS
from distserve.errors import InvalidRequest
from distserve.messages import Priority, SamplingParams, TrafficClass
from distserve_gateway.schema import TRAFFIC_CLASSES, SampledBody

MAX_N = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 4096
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024


@dataclass(frozen=True, slots=True)
class Range:
    """low..high, both allowed unless `above_low`."""

    low: float
    high: float
    above_low: bool = False

    @property
    def words(self) -> str:
        if self.high == float("inf"):
            return f"{'above' if self.above_low else 'at least'} {self.low:g}"
        low = f"above {self.low:g} and at most" if self.above_low else f"between {self.low:g} and"
        return f"{low} {self.high:.20g}"

    def check(self, param: str, value: float) -> None:
        """Raises InvalidRequest naming the field, its value and the range."""
        if not (self.low <= value <= self.high) or (self.above_low and value == self.low):
            raise InvalidRequest(
                f"{param} is {value}, must be {self.words}", param=param, value=_plain(value), expected=self.words
            )


RANGES = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, above_low=True),
    "top_k": Range(-1, 2**31 - 1),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 100, above_low=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "n": Range(1, MAX_N),
    "seed": Range(-(2**63), 2**64 - 1),
    "min_tokens": Range(0, 2**31 - 1),
    "max_tokens": Range(1, 2**31 - 1),
    "ttft_slo_ms": Range(0, MAX_SLO_MS, above_low=True),
    "tpot_slo_ms": Range(0, MAX_SLO_MS, above_low=True),
    "deadline_ms": Range(0, MAX_SLO_MS, above_low=True),
}

CLASS_OF: dict[Priority, TrafficClass] = {"vip": "decode", "normal": "prefill", "batch": "background"}


def _plain(value: float) -> float | str:
    return value if abs(value) < 2**63 else str(value)


def checked(body: SampledBody, name: str, default: Any) -> Any:
    """The field's value in its range, or `default` if it is absent."""
    value = getattr(body, name)
    if value is None:
        return default
    RANGES[name].check(name, value)
    return value


def sampling_params(body: SampledBody, *, vocab_size: int) -> SamplingParams:
    """Everything but max_tokens and logprobs, which depend on the prompt and the kind of request.

    The seed is the user's (as 64 bits), else drawn here, so that a resubmission draws the same tokens.
    """
    seed = checked(body, "seed", None)
    top_k = checked(body, "top_k", 0)
    return SamplingParams(
        max_tokens=1,
        seed=secrets.randbits(64) if seed is None else seed % 2**64,
        min_tokens=checked(body, "min_tokens", 0),
        temperature=checked(body, "temperature", 1.0),
        top_k=max(top_k, 0),
        top_p=checked(body, "top_p", 1.0),
        min_p=checked(body, "min_p", 0.0),
        repetition_penalty=checked(body, "repetition_penalty", 1.0),
        presence_penalty=checked(body, "presence_penalty", 0.0),
        frequency_penalty=checked(body, "frequency_penalty", 0.0),
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        stop_token_ids=_stop_token_ids(body.stop_token_ids or [], vocab_size),
        ignore_eos=bool(body.ignore_eos),
    )


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    if len(given) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias has {len(given)} tokens, must have at most {MAX_LOGIT_BIAS}",
            param="logit_bias",
            value=len(given),
            expected=f"<= {MAX_LOGIT_BIAS} tokens",
        )
    bias = {}
    for key, value in given.items():
        token_id = int(key) if key.isascii() and key.isdigit() and len(key) < 19 else -1
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {key!r}, must be an id from 0 to {vocab_size - 1}",
                param="logit_bias",
                value=key,
            )
        if not -100 <= value <= 100:
            raise InvalidRequest(
                f"logit_bias of token {key} is {value}, must be between -100 and 100", param="logit_bias", value=value
            )
        bias[token_id] = float(value)
    return bias


def check_token_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest naming the first id that the model does not have."""
    for i, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param}[{i}] is {token_id}, must be a token id from 0 to {vocab_size - 1}",
                param=param,
                value=_plain(token_id),
                expected=f"0..{vocab_size - 1}",
            )


def _stop_token_ids(given: list[int], vocab_size: int) -> tuple[int, ...]:
    if len(given) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids has {len(given)} ids, must have at most {MAX_STOP_TOKEN_IDS}", param="stop_token_ids"
        )
    check_token_ids("stop_token_ids", given, vocab_size)
    return tuple(given)


def stop_strings(body: SampledBody) -> tuple[str, ...]:
    """The stop strings, checked; none if absent."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings, must have at most {MAX_STOPS}", param="stop")
    for i, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"stop[{i}] has {len(stop)} characters, must have 1 to {MAX_STOP_CHARACTERS}",
                param="stop",
                value=stop[:60],
            )
    return tuple(dict.fromkeys(stops))


def traffic_class(body: SampledBody, priority: Priority) -> TrafficClass:
    """That of the priority if absent. Raises InvalidRequest naming those that there are."""
    value = body.traffic_class
    if value is None:
        return CLASS_OF[priority]
    if value not in TRAFFIC_CLASSES:
        expected = ", ".join(TRAFFIC_CLASSES)
        raise InvalidRequest(
            f"traffic_class is {value[:60]!r}, must be one of {expected}",
            param="traffic_class",
            value=value[:60],
            expected=expected,
        )
    return cast(TrafficClass, value)


def check_logprobs(param: str, value: int) -> int:
    Range(0, MAX_LOGPROBS).check(param, value)
    return value
