"""The figures of one server's answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import msgspec

from distserve.bench.answers import THROTTLED, Result
from distserve.bench.quantiles import estimate, num_needed
from distserve.bench.slo import Slo, is_good

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
Window = tuple[float, float]  # s since the measurement began
Samples = Callable[[Result], Sequence[float | None]]


class Quantile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`value_s` with its 95 % interval; None if there are fewer than `needs` samples."""

    value_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    needs: int


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    num: int
    mean_s: float | None
    quantiles: dict[str, Quantile]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    num: int
    example: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`latencies`: ttft, itl, tpot, e2e of the answers that ended well, since each was due; `ttft_from_sent` in an open
    loop, too. Rates are of what ended, or came, within the window of `window_s`. `good_*`: within the SLO, the share of
    all that were sent; None without one. `num_as_asked`: of those whose length the server told, how many had the length
    that was asked for."""

    num_requests: int
    num_ok: int
    num_warm: int
    window_s: float
    failures: dict[str, Failure]
    num_throttled: int
    num_retry_after: int
    requests_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float
    good_requests_per_s: float | None
    good_share: float | None
    latencies: dict[str, Distribution]
    input_mean: float | None
    output_mean: float | None
    num_input_told: int
    num_input_as_asked: int
    num_output_told: int
    num_output_as_asked: int
    cached_share: float | None
    tokens_per_event: float | None
    counted: dict[str, int]
    max_in_flight: int


def summarise(results: Sequence[Result], windows: Sequence[Window], slo: Slo, *, is_open: bool) -> Summary:
    """`results`: of one server, the warm-up's too, in the order in which they were due."""
    warm = [r for r in results if r.due_s < 0]
    sent = [r for r in results if r.due_s >= 0]
    ok = [r for r in sent if r.ok]
    window_s = sum(end - begin for begin, end in windows)
    per_s = 1 / window_s if window_s > 0 else 0.0
    num_good = sum(is_good(r, slo) for r in sent)
    told = [r for r in ok if r.num_input is not None]
    lengths = [r for r in ok if r.usage_told]
    return Summary(
        num_requests=len(sent),
        num_ok=len(ok),
        num_warm=len(warm),
        window_s=window_s,
        failures=_failures(sent),
        num_throttled=sum(r.kind == THROTTLED for r in sent),
        num_retry_after=sum(bool(r.retry_after) for r in sent),
        requests_per_s=per_s * sum(r.ok and _within(r.done_s, windows) for r in results),
        output_tokens_per_s=per_s * sum(tokens for r in results for at, tokens in arrivals(r) if _within(at, windows)),
        input_tokens_per_s=per_s
        * sum(r.num_input or r.num_input_asked for r in results if r.times_s and _within(r.times_s[0], windows)),
        good_requests_per_s=per_s * sum(is_good(r, slo) and _within(r.done_s, windows) for r in results)
        if slo
        else None,
        good_share=num_good / len(sent) if slo and sent else None,
        latencies=latencies(ok, is_open=is_open),
        input_mean=_mean([r.num_input for r in told if r.num_input is not None]),
        output_mean=_mean([r.num_output for r in ok]),
        num_input_told=len(told),
        num_input_as_asked=sum(r.num_input == r.num_input_asked for r in told),
        num_output_told=len(lengths),
        num_output_as_asked=sum(r.num_output == r.num_output_asked for r in lengths),
        cached_share=_share([r for r in told if r.num_cached is not None]),
        tokens_per_event=_per_event(ok),
        counted=dict(Counter(r.counted for r in ok)),
        max_in_flight=max((num for _, num in in_flight(results)), default=0),
    )


def latencies(ok: Sequence[Result], *, is_open: bool) -> dict[str, Distribution]:
    """Of answers that ended well."""
    found = {"ttft": distribution([[r.ttft_s()] for r in ok])}
    if is_open:
        found["ttft_from_sent"] = distribution([[r.ttft_s(from_sent=True)] for r in ok])
    found["itl"] = distribution([r.gaps_s() for r in ok])
    found["tpot"] = distribution([[r.tpot_s] for r in ok])
    found["e2e"] = distribution([[r.e2e_s] for r in ok])
    return found


def distribution(groups: Iterable[Sequence[float | None]]) -> Distribution:
    """`groups`: the samples of each request; None is no sample."""
    kept = [[v for v in group if v is not None] for group in groups]
    values = [v for group in kept for v in group]
    quantiles = {}
    for name, q in QUANTILES.items():
        found = estimate(kept, q)
        if found is None:
            quantiles[name] = Quantile(needs=num_needed(q))
        else:
            known = found.low == found.low  # not nan
            quantiles[name] = Quantile(
                value_s=found.value,
                low_s=found.low if known else None,
                high_s=found.high if known else None,
                needs=num_needed(q),
            )
    return Distribution(num=len(values), mean_s=_mean(values), quantiles=quantiles)


def arrivals(result: Result) -> list[tuple[float, float]]:
    """(when, tokens) of each event; events that don't say how many they brought have an even share."""
    scale = result.num_output / max(1, sum(result.counts))
    return [(at, scale * count) for at, count in zip(result.times_s, result.counts, strict=True)]


def in_flight(results: Sequence[Result]) -> list[tuple[float, int]]:
    """(from when on, how many were sent and not ended), in order."""
    steps = sorted(
        [(r.sent_s, 1) for r in results if r.sent_s is not None]
        + [(r.done_s, -1) for r in results if r.sent_s is not None]
    )
    return list(zip([at for at, _ in steps], accumulate(step for _, step in steps), strict=True))


def _failures(sent: Sequence[Result]) -> dict[str, Failure]:
    kinds = Counter(r.kind for r in sent if not r.ok)
    examples: dict[str, str] = {}
    for r in sent:
        examples.setdefault(r.kind, r.detail)
    return {kind: Failure(num=num, example=examples[kind]) for kind, num in kinds.most_common()}


def _within(at_s: float, windows: Sequence[Window]) -> bool:
    return any(begin <= at_s <= end for begin, end in windows)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _share(told: Sequence[Result]) -> float | None:
    num = sum(r.num_input or 0 for r in told)
    return sum(r.num_cached or 0 for r in told) / num if num else None


def _per_event(ok: Sequence[Result]) -> float | None:
    """Tokens of an event after the first of its answer."""
    num_events = sum(len(r.times_s) - 1 for r in ok)
    tokens = sum(r.num_output - r.counts[0] for r in ok if r.counts)
    return tokens / num_events if num_events else None
