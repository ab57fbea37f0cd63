"""Promises: kept, missed, refused, and how fast the error budget goes."""

from common import MODEL, OF_MODEL, attained, mean, quantile, quantiles, rate
from dashboard import Dashboard, Row
from panels import GREEN, RED, YELLOW, Query, curves, heatmap, number, steps, words

_TEXT = """
A request may be promised a first token, a pace, a deadline. **Attained** is of those that were promised anything and
let in; the refused are apart, since a quick no is what admission is for. **Burn** is how many times faster than the
objective of 99 % allows promises are missed: above 1 the month's budget will not last, above 14.4 (*last hour*)
somebody is woken. **Goodput** against all requests shows what is done in vain. When attainment falls, *Time by stage*
says whose workers are short; when refusals rise while attainment holds, the cluster is full and says so.
"""
_RATIO = steps((None, RED), (0.95, YELLOW), (0.99, GREEN))
_BURN = steps((None, GREEN), (1, YELLOW), (14.4, RED))

DASHBOARD = Dashboard(
    uid="distserve-slo",
    title="DistServe SLO",
    text="Promises kept and missed, goodput, refusals, the breaker.",
    variables=(MODEL,),
    first=(
        number(
            "Attained",
            attained(),
            text="Of the promised requests that ended now.",
            unit="percentunit",
            decimals=2,
            thresholds=_RATIO,
            width=4,
        ),
        number(
            "Burn, last hour",
            f"max(model:distserve_gateway_slo_missed:ratio1h{{{OF_MODEL}}}) / 0.01",
            text="1: as fast as the objective of 99 % allows.",
            decimals=1,
            thresholds=_BURN,
            width=4,
        ),
        number(
            "Burn, last 6 hours",
            f"max(model:distserve_gateway_slo_missed:ratio6h{{{OF_MODEL}}}) / 0.01",
            text="1: as fast as the objective of 99 % allows.",
            decimals=1,
            thresholds=steps((None, GREEN), (1, YELLOW), (6, RED)),
            width=4,
        ),
        number(
            "Goodput",
            f"sum(model:distserve_gateway_good_requests:rate5m{{{OF_MODEL}}})",
            text="Requests a second that ended well and within every promise, last 5 minutes.",
            unit="reqps",
            decimals=2,
            thresholds=steps((None, GREEN)),
            width=4,
        ),
        number(
            "Refused",
            rate("distserve_gateway_refused_requests_total", OF_MODEL),
            text="Requests a second that were answered 429 or 503.",
            unit="reqps",
            decimals=2,
            thresholds=steps((None, GREEN), (0.001, YELLOW)),
            width=4,
        ),
        number(
            "TTFT p99, last second",
            f'max(distserve_gateway_second_ttft_seconds{{{OF_MODEL}, quantile="0.99"}})',
            text="Of the first tokens of the last full second, exact. Nothing in a second without any.",
            unit="s",
            thresholds=steps((None, GREEN), (1, YELLOW), (5, RED)),
            width=4,
        ),
        words(_TEXT),
    ),
    rows=(
        Row(
            "Promises",
            (
                curves(
                    "Attained by class",
                    Query(f"model_priority:distserve_gateway_slo_attained:ratio5m{{{OF_MODEL}}}", "{{priority}}"),
                    text="Last 5 minutes, by priority. A class that was promised nothing has no curve.",
                    unit="percentunit",
                    most=1,
                    least=None,
                    thresholds=_RATIO,
                ),
                curves(
                    "Goodput by class",
                    Query(rate("distserve_gateway_requests_total", OF_MODEL), "all that ended"),
                    Query(rate("distserve_gateway_good_requests_total", OF_MODEL, "priority"), "good: {{priority}}"),
                    text="Requests a second.",
                    unit="reqps",
                ),
                curves(
                    "What became of requests",
                    Query(
                        rate("distserve_gateway_slo_requests_total", OF_MODEL, "priority", "attained"),
                        "{{priority}}, attained: {{attained}}",
                    ),
                    Query(
                        rate("distserve_gateway_refused_requests_total", OF_MODEL, "priority"), "{{priority}}, refused"
                    ),
                    text="Requests a second.",
                    unit="reqps",
                    stacked=True,
                ),
                curves(
                    "Missed",
                    Query(f"model:distserve_gateway_slo_missed:ratio5m{{{OF_MODEL}}}", "{{model}} 5 min"),
                    Query(f"model:distserve_gateway_slo_missed:ratio30m{{{OF_MODEL}}}", "{{model}} 30 min"),
                    Query(f"model:distserve_gateway_slo_missed:ratio1h{{{OF_MODEL}}}", "{{model}} 1 h"),
                    Query(f"model:distserve_gateway_slo_missed:ratio6h{{{OF_MODEL}}}", "{{model}} 6 h"),
                    text="Of the promised requests. Alerts: over 14.4 % in 1 h and 5 min, over 6 % in 6 h and 30 min.",
                    unit="percentunit",
                    thresholds=steps((None, GREEN), (0.01, YELLOW), (0.144, RED)),
                ),
                curves(
                    "Refused for a promise",
                    Query(rate("distserve_gateway_slo_refusals_total", OF_MODEL, "by"), "by the {{by}}"),
                    text="Sequences a second whose first token would have been late: seen by the gateway at once, or "
                    "by every worker that was asked.",
                    unit="ops",
                ),
                curves(
                    "Submitted again",
                    Query(rate("distserve_gateway_retries_total", OF_MODEL, "reason"), "{{reason}}"),
                    text="Times a second, by what the try before ended with.",
                    unit="ops",
                ),
            ),
        ),
        Row(
            "Times",
            (
                heatmap(
                    "First tokens by their time",
                    "distserve_gateway_ttft_seconds",
                    OF_MODEL,
                    text="Each cell: first tokens.",
                ),
                curves(
                    "Time to first token, each second",
                    Query(f"max by (quantile) (distserve_gateway_second_ttft_seconds{{{OF_MODEL}}})", "{{quantile}}"),
                    text="Quantiles of one second's first tokens at each scrape, exact; the worst gateway's.",
                    unit="s",
                    width=12,
                ),
                curves(
                    "Pace",
                    *quantiles("distserve_gateway_tpot_seconds", OF_MODEL, 0.5, 0.9, 0.99),
                    text="Mean time of an output's tokens after its first: what a promised pace is of.",
                    unit="s",
                ),
                curves(
                    "Time by stage, p99",
                    Query(quantile(0.99, "distserve_gateway_stage_seconds", OF_MODEL, "stage"), "{{stage}}"),
                    text="Where the slow ones were.",
                    unit="s",
                ),
                curves(
                    "Time by stage, mean",
                    Query(mean("distserve_gateway_stage_seconds", OF_MODEL, "stage"), "{{stage}}"),
                    text="Where most of the time goes.",
                    unit="s",
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Breaker",
            (
                curves(
                    "P99 that it looks at",
                    Query(
                        f"max by (instance) (distserve_gateway_breaker_ttft_p99_seconds{{{OF_MODEL}}})", "{{instance}}"
                    ),
                    text="Of the last second's times to first token, with the waits that are too long already.",
                    unit="s",
                ),
                curves(
                    "State",
                    Query(f"max by (instance) (distserve_gateway_breaker_state{{{OF_MODEL}}})", "{{instance}}"),
                    text="0 closed, 1 open, 2 half-open.",
                    most=2,
                ),
                curves(
                    "Where requests went",
                    Query(rate("distserve_gateway_breaker_requests_total", OF_MODEL, "to"), "{{to}}"),
                    text="Requests a second: here, here as a trial, to the fallback server, to both (X-First-Token), "
                    "or refused.",
                    unit="reqps",
                    stacked=True,
                ),
            ),
        ),
    ),
)
