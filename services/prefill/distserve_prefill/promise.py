"""What is left of a promise: a message says how long from its receipt on."""

import msgspec

from distserve.messages import Slo


def after(slo: Slo, elapsed_s: float) -> Slo:
    """The same promise so much later. (Negative: its first token is late.)"""
    return slo if slo.ttft_s is None else msgspec.structs.replace(slo, ttft_s=slo.ttft_s - elapsed_s)
