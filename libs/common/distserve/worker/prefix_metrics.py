"""What prefix hits have saved, for a worker's /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distserve.worker.prefixes import Prefixes

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


def hit_rate(prefixes: Prefixes) -> float | None:
    """Of the tokens of prompts that were begun, the share that was had; None before there were any."""
    return prefixes.num_cached_tokens / prefixes.num_tokens if prefixes.num_tokens else None


def families(prefixes: Prefixes, role: str) -> tuple[Metric, ...]:
    from prometheus_client.core import CounterMetricFamily

    prompts = CounterMetricFamily("distserve_prompt_tokens", "Tokens of prompts that were begun.", labels=("role",))
    prompts.add_metric((role,), prefixes.num_tokens)
    cached = CounterMetricFamily(
        "distserve_cached_prompt_tokens",
        "Of those, what the pool held when their turn came.",
        labels=("role",),
    )
    cached.add_metric((role,), prefixes.num_cached_tokens)
    return prompts, cached
