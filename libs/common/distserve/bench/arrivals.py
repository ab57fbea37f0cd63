"""When requests come that wait for nobody: seconds since the beginning, without end."""

import itertools
import random
from collections.abc import Iterator


def poisson(rng: random.Random, rate_hz: float) -> Iterator[float]:
    """Independent of each other: pauses are exponential with mean 1 / rate_hz."""
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate_hz)
        yield at_s


def constant(rate_hz: float) -> Iterator[float]:
    """Evenly, the first at once."""
    return (number / rate_hz for number in itertools.count())
