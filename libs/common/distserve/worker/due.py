"""By when a prompt's first token is due, and which class goes before which."""

from distserve.messages import Priority, Slo

RANKS: dict[Priority, int] = {"vip": 0, "normal": 1, "batch": 2}

# How long a prompt that was promised nothing stands back: by its class, seconds, and by its own length, so many times
# what it takes to compute. Newcomers' dues move on with the clock, so that it is overtaken only so long.
STANDS_BACK_S: dict[Priority, float] = {"vip": 1.0, "normal": 4.0, "batch": 30.0}
STANDS_BACK_TIMES = 4.0


def due_at(slo: Slo, received_at: float, prefill_s: float) -> float:
    """On the clock of received_at. prefill_s: what it takes to compute, as far as is known."""
    if slo.ttft_s is not None:
        return received_at + slo.ttft_s
    return received_at + stands_back_s(slo.priority, prefill_s)


def stands_back_s(priority: Priority, prefill_s: float) -> float:
    """How long after its receipt a prompt is due that was promised nothing."""
    return STANDS_BACK_S[priority] + STANDS_BACK_TIMES * prefill_s
