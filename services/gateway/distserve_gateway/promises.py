"""What is said where a promised first token can't come in time."""

import math
from collections.abc import Sequence

from distserve.errors import SloUnattainable
from distserve.messages import WorkerInfo
from distserve_gateway.costs import Costs
from distserve_gateway.predicting import EXACT_S

# A prediction may be off: up to this part of the promise later, and the worker is asked all the same. It knows better.
SLACK = 0.1


def unattainable(costs: Costs, candidates: Sequence[tuple[WorkerInfo, int]], ttft_s: float) -> SloUnattainable:
    """Every worker is too late. `candidates`: each, with what it may fetch; of one at least it is known how late."""
    over_s = ttft_s - costs.left_s  # since the request came
    predictions = [p for worker, fetchable in candidates if (p := costs.first_token(worker, fetchable)) is not None]
    first_token_s = over_s + min(p.first_token_s for p in predictions)
    retry_after_s: float | None = None
    for worker, fetchable in candidates:
        most_s = math.inf if retry_after_s is None else retry_after_s - EXACT_S
        if most_s > 0 and (after_s := costs.retry_after_s(worker, fetchable, most_s)) is not None:
            retry_after_s = after_s
    promised = f"the first token is promised within {ttft_s:.3g} s"
    if retry_after_s is None:
        least_s = over_s + min(p.own_s for p in predictions)
        why = f"the prompt alone takes {least_s:.3g} s: shorten it, or allow so much"
        return SloUnattainable(f"{promised}, {why}", ttft_s=first_token_s, slo_s=ttft_s)
    why = f"it would come after {first_token_s:.3g} s: try again in {retry_after_s:.3g} s"
    return SloUnattainable(
        f"{promised}, {why}", ttft_s=first_token_s, slo_s=ttft_s, retry_after_s=max(retry_after_s, EXACT_S)
    )


def overdue(ttft_s: float, cause: str, retry_after_s: float) -> SloUnattainable:
    """The promised time has passed, or will, without a worker that took it: `cause`. Nobody can tell when one would."""
    message = f"the first token is promised within {ttft_s:.3g} s, and by then {cause}"
    return SloUnattainable(message, slo_s=ttft_s, retry_after_s=retry_after_s)


def soonest(refusals: Sequence[SloUnattainable]) -> SloUnattainable:
    """Of several (at least one) workers' the one that may be tried again first."""

    def after_s(refusal: SloUnattainable) -> float:
        value = refusal.fields.get("retry_after_s")
        return float(value) if isinstance(value, int | float) else float("inf")

    return min(refusals, key=after_s)
