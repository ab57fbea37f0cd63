"""Whether a request got what it was promised: judged once, at its end."""

from typing import Literal

from distserve.errors import DistServeError
from distserve_gateway.calls import Terms

Attained = Literal["yes", "no", "unpromised"]

REFUSED = (429, 503)  # status of an answer to one that was never begun


def is_refusal(error: DistServeError | None) -> bool:
    """Of an error that came before anything ran: it was turned away, and neither failed nor broke a promise."""
    return error is not None and error.http_status in REFUSED


def is_failure(error: DistServeError | None) -> bool:
    """Ours, not its client's. Whoever calls it has set refusals apart."""
    return error is not None and error.http_status >= 500


def attained(
    terms: Terms,
    *,
    complete: bool,
    error: DistServeError | None = None,
    e2e_s: float,
    ttft_s: float | None,
    tpot_s: float | None,
) -> Attained:
    """Of a request that was let in; a refused one has no place here (is_refusal).

    complete: its whole answer came. error: what ended it early; None with `complete` False: its client left. Seconds
    since its receipt: e2e_s to its end, ttft_s to the first token of the last of its outputs to have one (None: not all
    had). tpot_s: mean time of a token after the first, of its slowest output (None: none had two).

    One that its client ended, or got wrong, is "unpromised" unless a promise was broken by then: nobody knows how it
    would have gone on. One that failed has not got what was promised.
    """
    if terms.ttft_s is None and terms.tpot_s is None and terms.deadline_s is None:
        return "unpromised"
    waited_s = e2e_s if ttft_s is None else ttft_s
    is_late = (
        (terms.ttft_s is not None and waited_s > terms.ttft_s)
        or (terms.tpot_s is not None and tpot_s is not None and tpot_s > terms.tpot_s)
        or (terms.deadline_s is not None and e2e_s > terms.deadline_s)
    )
    if is_late or is_failure(error):
        return "no"
    return "yes" if complete else "unpromised"
