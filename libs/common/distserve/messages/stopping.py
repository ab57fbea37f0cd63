"""Ending a request early that may run on any gateway."""

from distserve.messages.base import Message, NonNegativeInt


class StopRequest(Message, frozen=True):
    """Gateway -> gateway: end all requests of this tenant that have this name. Answered by StopReply."""

    tenant: str  # as in Terms: a key's name; empty: of those without
    name: str  # an answer's id, or an asker's own


class StopReply(Message, frozen=True):
    """What was ended; all 0 if it had none."""

    num_requests: NonNegativeInt = 0
    num_outputs: NonNegativeInt = 0
    num_output_tokens: NonNegativeInt = 0

    def plus(self, other: "StopReply") -> "StopReply":
        return StopReply(
            num_requests=self.num_requests + other.num_requests,
            num_outputs=self.num_outputs + other.num_outputs,
            num_output_tokens=self.num_output_tokens + other.num_output_tokens,
        )
