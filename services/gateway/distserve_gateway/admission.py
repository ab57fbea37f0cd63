"""Whether a request may come in at all: not while the gateway drains, and not beyond its limit."""

from collections.abc import Iterator
from contextlib import contextmanager

from distserve.errors import Draining, InvalidRequest, Overloaded


class Admission:
    """`max_concurrent` sequences may live at once, and as many requests be on their way in: read, being tokenised."""

    def __init__(self, max_concurrent: int) -> None:
        self.max_concurrent = max_concurrent
        self.num_entering = 0
        self.draining = False

    def check_size(self, num_prompts: int, n: int) -> None:
        """Raises InvalidRequest for a request that could never be admitted: before any work is done for it."""
        num_outputs = num_prompts * n
        if num_outputs > self.max_concurrent:
            param = "n" if num_prompts <= self.max_concurrent else "prompt"
            raise InvalidRequest(
                f"{num_prompts} prompts with n = {n} ask for {num_outputs} outputs, must be at most "
                f"{self.max_concurrent} in one request: ask for fewer at a time",
                param=param,
                value=num_outputs,
                expected=f"<= {self.max_concurrent}",
            )

    @contextmanager
    def entering(self) -> Iterator[None]:
        """One more is on its way in. Raises Overloaded, before any work is done for it."""
        if self.num_entering >= self.max_concurrent:
            raise Overloaded(
                f"{self.num_entering} requests are on their way in, at most {self.max_concurrent} may be",
                retry_after_s=1.0,
            )
        self.num_entering += 1
        try:
            yield
        finally:
            self.num_entering -= 1

    def check(self, num_new: int, num_live: int) -> None:
        """Raises Draining or Overloaded."""
        if self.draining:
            raise Draining("this gateway is going away, try again", retry_after_s=1.0)
        if num_live + num_new > self.max_concurrent:
            raise Overloaded(
                f"{num_live} sequences are live and {num_new} more are asked for, at most {self.max_concurrent} may be",
                retry_after_s=1.0,
            )
