"""What API keys may use, counted: requests a minute, tokens a minute, requests at once. In this process alone."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from distserve.api_keys import ApiKey
from distserve.errors import InvalidRequest, RateLimited
from distserve_gateway.bucket import Bucket, Charge

RETRY_S = 1.0  # at the limit of requests at once: nobody knows when one of them ends


class _Account:
    """What a key has used."""

    def __init__(self, key: ApiKey) -> None:
        self.key = key
        self.num_open = 0
        self.requests = Bucket(key.requests_per_minute) if key.requests_per_minute is not None else None
        self.tokens = Bucket(key.tokens_per_minute) if key.tokens_per_minute is not None else None


class Permits:
    def __init__(self, keys: Iterable[ApiKey] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._accounts = {key.name: _Account(key) for key in keys}
        self._clock = clock

    def num_open(self, name: str) -> int:
        """Requests of the key of this name that are under way."""
        return self._accounts[name].num_open

    def open(self, key: ApiKey) -> "Permit":
        """For one request, before its body is looked at. Raises RateLimited."""
        if not key.name:  # nobody's: everybody may ask
            return Permit(None, None, self._clock)
        account = self._accounts[key.name]
        limit = key.max_concurrent
        if limit is not None and account.num_open >= limit:
            raise RateLimited(
                f"API key {key.name!r} has {account.num_open} requests under way, at most {limit} may be at once",
                key=key.name,
                limit="max_concurrent",
                retry_after_s=RETRY_S,
            )
        charge = None
        if account.requests is not None:
            now = self._clock()
            if wait_s := account.requests.wait_s(1, now):
                raise RateLimited(
                    f"API key {key.name!r} may make {key.requests_per_minute} requests a minute: the next in "
                    f"{wait_s:.3g} s",
                    key=key.name,
                    limit="requests_per_minute",
                    retry_after_s=wait_s,
                )
            charge = account.requests.take(1, now)
        account.num_open += 1
        return Permit(account, charge, self._clock)


@dataclass(slots=True, eq=False)
class Permit:
    """One request's part of what its key may use. Its owner closes it, whatever happens."""

    _account: _Account | None
    _request: Charge | None
    _clock: Callable[[], float]
    _tokens: Charge | None = None
    _has_work: bool = False

    def work(self) -> None:
        """From now on time is spent on the request."""
        self._has_work = True

    def charge(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Take the tokens of the prompts, and the most that may come. Raises RateLimited; close() it then too."""
        account = self._account
        if account is None or account.tokens is None:
            return
        name, limit = account.key.name, account.tokens.per_minute
        now, wanted = self._clock(), num_prompt_tokens + num_output_tokens
        wait_s = account.tokens.wait_s(wanted, now)
        if not wait_s:
            self._tokens = account.tokens.take(wanted, now)
            return
        asks = f"{wanted} tokens ({num_prompt_tokens} of prompt and up to {num_output_tokens} of output)"
        if wait_s == math.inf:
            room = limit - num_prompt_tokens
            would_do = f"outputs of at most {room} together (max_tokens)" if room > 0 else f"at most {limit} in all"
            raise RateLimited(
                f"the request may use {asks}, more than API key {name!r} may in a minute, {limit}: must ask for "
                f"{would_do}",
                key=name,
                limit="tokens_per_minute",
            )
        raise RateLimited(
            f"API key {name!r} may use {limit} tokens a minute, the request {asks}: they are there in {wait_s:.3g} s",
            key=name,
            limit="tokens_per_minute",
            retry_after_s=wait_s,
        )

    def refused(self, error: BaseException) -> None:
        """Close it for a request that was not let in. One that took work, and would be refused again whenever it came,
        counts as a request."""
        is_wrong = isinstance(error, InvalidRequest | RateLimited) and "retry_after_s" not in error.fields
        self.close(0 if self._has_work and is_wrong else None)

    def close(self, num_tokens: int | None = None) -> None:
        """Give back what was not used. num_tokens: of prompts and outputs; None: it never began to run, so it counts
        as if it had not been. Idempotent."""
        account, self._account = self._account, None
        if account is None:
            return
        account.num_open -= 1
        if account.requests is not None and self._request is not None:
            account.requests.settle(self._request, 0 if num_tokens is None else 1)
        if account.tokens is not None and self._tokens is not None:
            account.tokens.settle(self._tokens, num_tokens or 0)
