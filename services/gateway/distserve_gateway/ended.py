"""A request that has ended, as everybody is told of it who counts, judges or shows requests."""

from dataclasses import dataclass

from distserve.errors import DistServeError
from distserve.messages import Timings
from distserve_gateway.attainment import Attained, attained, is_failure, is_refusal
from distserve_gateway.calls import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Of a Call that an Answer carried. Seconds; ttft_s, tpot_s and e2e_s as attained() takes them.

    outcome: ok, cancelled, or its error's code. begun: a worker, or the fallback server, had taken all of it. tpots_s:
    of each output with two tokens. num_looked_up_tokens: of the prompts those that workers here looked for in KV, and
    num_cached_tokens what they, or the fallback server, found. timings: of several outputs the slowest of each; 0: not
    told.
    """

    call: Call
    outcome: str
    error: DistServeError | None
    begun: bool
    e2e_s: float
    ttft_s: float | None
    tpots_s: list[float]
    num_output_tokens: int
    num_looked_up_tokens: int
    num_cached_tokens: int
    finish_reasons: list[str]  # of its outputs that have come to their end
    timings: Timings

    @property
    def tpot_s(self) -> float | None:
        return max(self.tpots_s, default=None)

    @property
    def is_refused(self) -> bool:
        return not self.begun and is_refusal(self.error)

    @property
    def is_failed(self) -> bool:
        return is_failure(self.error) and not self.is_refused

    @property
    def attained(self) -> Attained:
        """Of one that was not refused."""
        return attained(
            self.call.terms,
            complete=self.outcome == "ok",
            error=self.error,
            e2e_s=self.e2e_s,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
        )

    @property
    def is_good(self) -> bool:
        """It ended well, within every promise."""
        return self.outcome == "ok" and self.attained != "no"
