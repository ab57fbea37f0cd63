"""What several dashboards say alike: their variables, quantiles, rates."""

from __future__ import annotations

from dashboard import Variable
from panels import Query

MODEL = Variable("model", "Model", "label_values(distserve_gateway_live_sequences, model)")
WORKER = Variable(
    "worker", "Worker", 'label_values(distserve_worker_total_blocks{model=~"$model", role=~"prefill|decode"}, instance)'
)
NODE = Variable("node", "Store node", "label_values(distserve_kvstore_blocks, instance)")

OF_MODEL = 'model=~"$model"'
OF_WORKER = 'model=~"$model", instance=~"$worker"'
OF_NODE = 'instance=~"$node"'


def quantile(share: float, metric: str, selector: str, *by: str) -> str:
    labels = ", ".join((*by, "le"))
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{{{selector}}}[$__rate_interval])))"


def quantiles(metric: str, selector: str, *shares: float) -> list[Query]:
    return [Query(quantile(share, metric, selector), f"p{share * 100:g}") for share in shares or (0.5, 0.9, 0.99)]


def mean(metric: str, selector: str, *by: str) -> str:
    """Of a histogram, or of two counters that end as one's do."""
    labels = f" by ({', '.join(by)})" if by else ""
    total, num = (f"sum{labels} (rate({metric}_{end}{{{selector}}}[$__rate_interval]))" for end in ("sum", "count"))
    return f"{total} / {num}"


def rate(counter: str, selector: str, *by: str) -> str:
    labels = f" by ({', '.join(by)})" if by else ""
    return f"sum{labels} (rate({counter}{{{selector}}}[$__rate_interval]))"


def attained() -> str:
    """Of the promised requests that end now, those that got all they were promised."""
    yes, promised = (f"{OF_MODEL}, attained{of}" for of in ('="yes"', '=~"yes|no"'))
    return " / ".join(rate("distserve_gateway_slo_requests_total", of) for of in (yes, promised))
