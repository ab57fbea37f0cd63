"""From a committed lease to a sequence of ours. Pure: nothing is registered here."""

import math
import time

import msgspec

from distserve.engine.sequence import Sequence
from distserve.errors import InvalidRequest
from distserve.messages import SequenceState, num_blocks_for
from distserve.transport.base import Commit
from distserve_decode.live import Arrival, Live
from distserve_decode.reservations import Reservation


def arrived(state: SequenceState, reservation: Reservation, commit: Commit, block_size: int) -> Live:
    """The sequence as it stands before token 0, which is in its arrival if prefill drew it.

    The blocks stay the reservation's: the caller gives them to the sequence, or back. Raises InvalidRequest for a
    state that doesn't fit its lease.
    """
    if state.key != reservation.key:
        raise InvalidRequest(f"the state is of {state.key}, the lease of {reservation.key}", param="key")
    held = num_blocks_for(state.num_computed_tokens, block_size)
    num_drawn = len(state.token_ids) - state.num_computed_tokens
    if held != len(reservation.lease.block_ids) or num_drawn not in (0, 1):
        raise InvalidRequest(
            f"the state of {state.key} has {len(state.token_ids)} tokens and KV of {state.num_computed_tokens}, "
            f"the lease {len(reservation.lease.block_ids)} blocks",
            param="num_computed_tokens",
        )
    sequence = Sequence(
        state.key,
        list(state.token_ids[: state.num_computed_tokens]),
        state.num_prompt_tokens,
        state.sampling,
        num_computed_tokens=state.num_computed_tokens,
    )
    return Live(
        sequence,
        state.gateway,
        math.inf if state.deadline_s is None else time.monotonic() + state.deadline_s,
        msgspec.structs.replace(
            state.timings,
            transfer_s=max(0.0, time.time() - state.sampled_at_unix_s),
            kv_bytes=commit.num_bytes,
            transport=reservation.receiver.kind,
        ),
        arrival=Arrival(
            token_id=state.token_ids[-1] if num_drawn else None,
            logprob=state.first_logprob,
            prompt_logprobs=state.prompt_logprobs,
            num_cached_tokens=state.num_cached_tokens,
            hidden=state.last_hidden,
            hidden_dtype=state.last_hidden_dtype,
        ),
    )
