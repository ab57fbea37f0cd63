"""The table on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distserve.bench.document import Document, Ratio, Side
from distserve.bench.summary import QUANTILES, Quantile, Summary
from distserve.bench.units import in_ms, plain

TITLES = {
    "ttft": "time to first token",
    "ttft_from_sent": "the same, from sending",
    "itl": "between tokens (ITL)",
    "tpot": "per output token (TPOT)",
    "e2e": "whole answer (E2E)",
}


def lines(document: Document) -> Iterator[str]:
    """`document`, without its requests, for people."""
    for side in document.sides:
        yield from _side(document, side)
    if document.ratios:
        yield from _ratios(document)
    yield ""
    yield from _client(document)
    for warning in document.warnings:
        yield f"warning: {warning}"


def _side(document: Document, side: Side) -> Iterator[str]:
    s = side.summary
    name = f"{side.name}: " if side.name else ""
    yield ""
    yield f"{name}{side.server.model} at {side.server.url}{side.server.endpoint}"
    yield f"  {document.traffic}"
    yield f"  {', '.join(requests_in_words(s))}"
    for kind, failure in s.failures.items():
        yield f"    {failure.num} x {kind}: {failure.example}" if failure.example else f"    {failure.num} x {kind}"
    yield f"  {'; '.join(rates_in_words(s))}"
    yield f"  {lengths_in_words(side)}"
    yield ""
    rows = [[TITLES[name], *map(cell, d.quantiles.values()), _mean(d.mean_s)] for name, d in s.latencies.items()]
    yield from table(["ms", *(name.upper() for name in QUANTILES), "mean"], rows)
    for note in notes(s):
        yield f"  {note}"


def requests_in_words(s: Summary) -> list[str]:
    found = [f"{s.num_ok} of {s.num_requests} requests ended well in {s.window_s:.1f} s"]
    if s.num_warm:
        found.append(f"{s.num_warm} of the warm-up left out")
    if s.num_throttled:
        found.append(f"{s.num_throttled} throttled ({s.num_retry_after} with Retry-After)")
    return [*found, f"at most {s.max_in_flight} at once"]


def rates_in_words(s: Summary) -> list[str]:
    found = [
        f"{plain(s.requests_per_s)} requests/s",
        f"{plain(s.output_tokens_per_s)} output tokens/s",
        f"{plain(s.input_tokens_per_s)} input tokens/s",
    ]
    if s.good_requests_per_s is not None:
        found.append(f"goodput {plain(s.good_requests_per_s)} requests/s ({s.good_share or 0:.1%} within the SLO)")
    return found


def lengths_in_words(side: Side) -> str:
    s = side.summary
    prompt = "prompts: length not told"
    if s.input_mean is not None:
        prompt = (
            f"prompts of {s.input_mean:,.1f} tokens on average ({s.num_input_as_asked} of {s.num_input_told} as asked"
        )
        prompt += f"; lengths: {side.server.lengths_by})"
    answer = "no answers" if s.output_mean is None else f"answers of {s.output_mean:,.1f}"
    kept = f" ({s.num_output_as_asked} of {s.num_output_told} as asked)" if s.num_output_told else ""
    return f"{prompt}; {answer}{kept}"


def notes(s: Summary) -> list[str]:
    """What the table's cells mean here."""
    found = ["in brackets: 95 % interval"]
    lacking = [f"{name.upper()} {q.needs:,}" for name, q in s.latencies["ttft"].quantiles.items() if q.value_s is None]
    if lacking:
        found.append(f"n/a: too few samples; needed are {', '.join(lacking)} (10 beyond the quantile)")
    if "ttft_from_sent" in s.latencies:
        found.append("latencies count from when a request was due, also if it was sent later")
    counted = {
        "usage": "tokens are counted by the usage that comes with each event",
        "events": "an event is counted as a token",
    }
    return found + [text for name, text in counted.items() if name in s.counted]


def cell(q: Quantile) -> str:
    if q.value_s is None:
        return "n/a"
    if q.low_s is None or q.high_s is None:
        return in_ms(q.value_s)
    return f"{in_ms(q.value_s)} [{in_ms(q.low_s)}, {in_ms(q.high_s)}]"


def _mean(value: float | None) -> str:
    return "n/a" if value is None else in_ms(value)


def _ratios(document: Document) -> Iterator[str]:
    yield ""
    yield "B over A, in interleaved slices of the same traffic"
    yield ""
    yield from table(["", "A", "B", "B / A", "95 % interval"], [ratio_row(r) for r in document.ratios])


def ratio_row(r: Ratio) -> list[str]:
    unit = plain if r.figure.endswith("/s") else in_ms
    values = ["n/a" if v is None else unit(v) for v in (r.a, r.b)]
    interval = "n/a" if r.low is None or r.high is None else f"{r.low:.3f} to {r.high:.3f}"
    name = r.figure if r.figure.endswith("/s") else f"{r.figure}, ms"
    return [name, *values, "n/a" if r.ratio is None else f"{r.ratio:.3f}", interval]


def _client(document: Document) -> Iterator[str]:
    client = document.client
    floor = client.floor
    hardware = client.hardware
    yield f"client: {hardware['CPU']}, {hardware['cores']} cores, {hardware['memory']}, {hardware['system']}"
    yield f"  {'; '.join(use_in_words(document))}"
    if floor is not None:
        yield (
            f"  alone, {floor.concurrency} streams: first token {in_ms(floor.ttft_p50_s)} ms (P50), "
            f"{plain(floor.events_per_s)} events/s, {floor.cpu_us_per_event:.1f} us of CPU an event"
        )
    yield f"  {client.loop}, Python {client.python}, distserve {client.version}; began {document.began}"


def use_in_words(document: Document) -> list[str]:
    use = document.client.use
    found = [f"{use.cores:.0%} of a core", f"woke {in_ms(use.loop_late_p99_s)} ms late (P99)"]
    if use.send_late_p99_s is not None and use.send_late_p50_s is not None:
        found.append(f"sent {in_ms(use.send_late_p50_s)} ms late (P50), {in_ms(use.send_late_p99_s)} (P99)")
    return found


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for cells in (headings, *rows):
        others = (f"{text:>{width}}" for text, width in zip(cells[1:], widths[1:], strict=True))
        yield f"  {cells[0]:<{widths[0]}}  {'  '.join(others)}".rstrip()
