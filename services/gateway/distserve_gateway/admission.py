"""Whether a request may come in at all: not while the gateway drains, and not beyond its limit."""

from distserve.errors import Draining, InvalidRequest, Overloaded


class Admission:
    """`max_concurrent` sequences may live at once."""

    def __init__(self, max_concurrent: int) -> None:
        self.max_concurrent = max_concurrent
        self.draining = False

    def check(self, num_new: int, num_live: int) -> None:
        """Raises Draining, Overloaded, or InvalidRequest for a request that could never be admitted."""
        if self.draining:
            raise Draining("this gateway is going away, try again", retry_after_s=1.0)
        if num_new > self.max_concurrent:
            raise InvalidRequest(
                f"the request asks for {num_new} outputs, must be at most {self.max_concurrent}",
                param="n",
                value=num_new,
            )
        if num_live + num_new > self.max_concurrent:
            raise Overloaded(
                f"{num_live} sequences are live and {num_new} more are asked for, at most {self.max_concurrent} may be",
                retry_after_s=1.0,
            )
