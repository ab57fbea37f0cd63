"""How long prompts and answers are, in tokens: fixed, uniform, or by a power law."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol

from distserve.bench.errors import BadOption

FORMS = "a number, uniform:min=1,max=100 or powerlaw:mean=512,max=4096 (and min=, 1 unless said)"


class Lengths(Protocol):
    """Draws tokens, at least 1. `str()` of it is as it was written."""

    def draw(self, rng: random.Random) -> int: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    value: int

    def draw(self, rng: random.Random) -> int:
        return self.value

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every number from `low` to `high`, both included, as likely."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"uniform:min={self.low},max={self.high}"


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """Density in step with x^-exponent from `low` to `high` (a bounded Pareto distribution), rounded to whole tokens.

    The exponent is that which gives `mean`, before rounding: see `power_law`."""

    mean: float
    low: int
    high: int
    exponent: float

    def draw(self, rng: random.Random) -> int:
        span, power = math.log(self.high / self.low), 1 - self.exponent
        u = rng.random()
        step = u * span if abs(power) < 1e-9 else math.log1p(u * math.expm1(power * span)) / power
        return min(self.high, max(self.low, round(self.low * math.exp(step))))

    def __str__(self) -> str:
        return f"powerlaw:mean={self.mean:g},min={self.low},max={self.high}"


def power_law(mean: float, low: int, high: int) -> PowerLaw:
    """Raises ValueError for a mean that no falling power law between these bounds has."""
    span = math.log(high / low)

    def mean_of(exponent: float) -> float:
        return low * _integral(2 - exponent, span) / _integral(1 - exponent, span)

    flattest, steepest = 0.0, 2 + 200 / span  # of the second, nearly all is the minimum
    if not mean_of(steepest) <= mean <= mean_of(flattest):
        raise ValueError(f"the mean of a power law from {low} to {high} lies between {low} and {(low + high) / 2:g}")
    for _ in range(60):
        middle = (flattest + steepest) / 2
        if mean_of(middle) > mean:
            flattest = middle
        else:
            steepest = middle
    return PowerLaw(mean, low, high, (flattest + steepest) / 2)


def _integral(power: float, span: float) -> float:
    """Of e^(power * t) over t from 0 to span."""
    return span if abs(power) < 1e-9 else math.expm1(power * span) / power


def parse_lengths(option: str, text: str) -> Lengths:
    """Raises BadOption."""
    kind, colon, rest = text.partition(":")
    try:
        if not colon:
            return Fixed(_whole(text))
        fields = {name.strip(): value for name, _, value in (part.partition("=") for part in rest.split(","))}
        if kind == "uniform" and fields.keys() == {"min", "max"}:
            low, high = _whole(fields["min"]), _whole(fields["max"])
            if low > high:
                raise ValueError("min is above max")
            return Uniform(low, high)
        if kind == "powerlaw" and {"mean", "max"} <= fields.keys() <= {"mean", "min", "max"}:
            low, high = _whole(fields.get("min", "1")), _whole(fields["max"])
            if low >= high:
                raise ValueError("min is not below max")
            return power_law(float(fields["mean"]), low, high)
    except ValueError as e:
        raise BadOption(option, text, f"{e}; it is {FORMS}") from None
    raise BadOption(option, text, f"it is {FORMS}")


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{text!r} is no whole number") from None
    if value < 1:
        raise ValueError(f"{value} is below 1 token")
    return value
