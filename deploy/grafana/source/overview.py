"""The first dashboard to look at: does it serve, how fast, how much, who is there."""

from common import MODEL, OF_MODEL, OF_WORKER, WORKER, attained, mean, quantile, quantiles, rate
from dashboard import Dashboard, Row
from panels import GREEN, RED, YELLOW, Query, column, curves, mappings, number, steps, table, words

_TEXT = """
**Top row, left to right:** what runs, what comes, what leaves in time. *Goodput* counts only requests that ended well
and within every promise; the more it lags behind *Requests*, the more work is in vain. *Attained* is the share of
promised requests that got all they were promised (dashboard **SLO**). A *breaker* that is not closed means that first
tokens took too long.
**Where time goes:** queue and prefill grow when prefill is short of workers, decode when decode is (dashboard
**Disaggregation**). **Blocks:** *cached* ones are free and still hold prefixes; when they are gone, prefixes are lost
(dashboard **KV store**).
"""

_WORKERS = OF_WORKER + ', role=~"prefill|decode"'  # store nodes have such figures too
_UP = {"1": ("up", GREEN), "0": ("silent", RED)}
_BREAKER = {"0": ("closed", GREEN), "1": ("open", RED), "2": ("half-open", YELLOW)}

TOKENS = " + ".join(rate(f"distserve_gateway_{name}_seconds_count", OF_MODEL) for name in ("itl", "ttft"))

DASHBOARD = Dashboard(
    uid="distserve-overview",
    title="DistServe overview",
    text="Whether the cluster serves, how fast, and who is there.",
    variables=(MODEL, WORKER),
    first=(
        number(
            "Live",
            f"sum(distserve_gateway_live_sequences{{{OF_MODEL}}})",
            text="Sequences that run now.",
        ),
        number(
            "Requests",
            rate("distserve_gateway_requests_total", OF_MODEL),
            text="Requests that ended, a second, refused ones too.",
            unit="reqps",
            decimals=2,
        ),
        number(
            "Goodput",
            rate("distserve_gateway_good_requests_total", OF_MODEL),
            text="Requests that ended well and within every promise, a second.",
            unit="reqps",
            decimals=2,
            thresholds=steps((None, GREEN)),
        ),
        number(
            "Output",
            TOKENS,
            text="Tokens that came, a second: first ones and those after.",
            unit="suffix: tok/s",
            decimals=0,
        ),
        number(
            "TTFT p99",
            quantile(0.99, "distserve_gateway_ttft_seconds", OF_MODEL),
            text="Request received to first token.",
            unit="s",
            thresholds=steps((None, GREEN), (1, YELLOW), (5, RED)),
        ),
        number(
            "Attained",
            attained(),
            text="Of the requests that were promised anything, those that got all of it.",
            unit="percentunit",
            decimals=1,
            thresholds=steps((None, RED), (0.95, YELLOW), (0.99, GREEN)),
        ),
        number(
            "Breaker",
            f"max(distserve_gateway_breaker_state{{{OF_MODEL}}})",
            text="The worst of all gateways; nothing where breakers are off.",
            values=mappings(_BREAKER),
            thresholds=steps((None, GREEN), (1, RED), (2, YELLOW)),
        ),
        number(
            "Silent services",
            'sum(1 - up{job=~"gateway|prefill|decode|kvstore"})',
            text="Services that do not answer Prometheus.",
            thresholds=steps((None, GREEN), (1, RED)),
            decimals=0,
        ),
        words(_TEXT, height=5),
    ),
    rows=(
        Row(
            "What users see",
            (
                curves(
                    "Time to first token",
                    *quantiles("distserve_gateway_ttft_seconds", OF_MODEL),
                    text="Request received to an output's first token.",
                    unit="s",
                ),
                curves(
                    "Inter-token latency",
                    *quantiles("distserve_gateway_itl_seconds", OF_MODEL),
                    text="Gap between two tokens of an output.",
                    unit="s",
                ),
                curves(
                    "End to end",
                    *quantiles("distserve_gateway_e2e_seconds", OF_MODEL),
                    text="Request received to its end. Long answers take long: see the time per token first.",
                    unit="s",
                ),
                curves(
                    "Requests by outcome",
                    Query(rate("distserve_gateway_requests_total", OF_MODEL, "outcome"), "{{outcome}}"),
                    text="Requests that ended, a second: ok, cancelled, or an error's code.",
                    unit="reqps",
                    stacked=True,
                ),
                curves(
                    "Tokens",
                    Query(TOKENS, "output"),
                    Query(rate("distserve_gateway_prompt_tokens_total", OF_MODEL), "prompt"),
                    Query(rate("distserve_gateway_cached_tokens_total", OF_MODEL), "prompt, found in caches"),
                    text="Tokens a second. Those of prompts are counted when their request ends.",
                    unit="suffix: tok/s",
                ),
                curves(
                    "Where time goes",
                    Query(mean("distserve_gateway_stage_seconds", OF_MODEL, "stage"), "{{stage}}"),
                    text="Mean seconds of a request in each stage: prefill's queue, computing the prompt, handing over "
                    "the KV, decoding.",
                    unit="s",
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Workers",
            (
                curves(
                    "Running",
                    Query(f"sum by (role) (distserve_worker_running_sequences{{{_WORKERS}}})", "{{role}}"),
                    text="Sequences that are computed or handed over.",
                ),
                curves(
                    "Waiting",
                    Query(f"sum by (role) (distserve_worker_waiting_sequences{{{_WORKERS}}})", "{{role}}"),
                    text="Sequences that wait to be computed, or for room.",
                ),
                curves(
                    "KV blocks",
                    Query(f"sum by (role, state) (distserve_worker_blocks{{{OF_WORKER}}})", "{{role}} {{state}}"),
                    text="Free: empty. Cached: nobody's, but they may be found again. Used: a sequence's.",
                    stacked=True,
                ),
                curves(
                    "Routes",
                    Query(rate("distserve_gateway_routes_total", OF_MODEL, "kind"), "{{kind}}"),
                    text="Sequences taken, a second: by a pair of workers, or by a decode worker that does the "
                    "prompt itself: it holds most of it (local), prefill is behind (spill) or gone (alone), or it is "
                    "colocated.",
                    unit="ops",
                    stacked=True,
                ),
                table(
                    "Services",
                    Query('up{job=~"gateway|prefill|decode|kvstore"}'),
                    Query("distserve_build_info"),
                    Query("distserve_worker_degraded or distserve_kvstore_degraded"),
                    text="Everybody that Prometheus knows.",
                    rename={
                        "job": "role",
                        "instance": "at",
                        "version": "version",
                        "Value #A": "answers",
                        "Value #C": "degraded",
                    },
                    overrides=(
                        column("answers", "short", _UP),
                        column("degraded", "short", {"0": ("no", GREEN), "1": ("yes", YELLOW)}),
                    ),
                    width=8,
                ),
                table(
                    "Alerts that fire",
                    Query('ALERTS{alertname=~"DistServe.*", alertstate="firing"}'),
                    text="Of ../prometheus/rules/alerts.yml. Empty is good.",
                    rename={
                        "alertname": "alert",
                        "severity": "severity",
                        "model": "model",
                        "job": "role",
                        "instance": "at",
                    },
                    width=8,
                ),
            ),
        ),
    ),
)
