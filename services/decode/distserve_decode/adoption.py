"""From a committed lease to a sequence of ours. Pure: nothing is registered here."""

import time

import msgspec

from distserve.engine.sequence import Sequence
from distserve.errors import InvalidRequest, KVError
from distserve.kv.hashing import Chain
from distserve.messages import SequenceState, num_blocks_for
from distserve.transport.base import Commit
from distserve.worker.store.offers import Label
from distserve_decode.live import Arrival, Live, deadline_at
from distserve_decode.reservation import Reservation


def arrived(
    state: SequenceState, chain: Chain | None, reservation: Reservation, commit: Commit, block_size: int
) -> Live:
    """The sequence as it stands before token 0, which is in its arrival if prefill drew it. `chain`: made of the
    state's tokens.

    The blocks stay the reservation's: the caller gives them to the sequence, or back. Raises InvalidRequest for a
    state that doesn't fit its lease, KVError for one whose tokens are not those that its prefix hits hold.
    """
    if state.key != reservation.key:
        raise InvalidRequest(f"the state is of {state.key}, the lease of {reservation.key}", param="key")
    held = num_blocks_for(state.num_computed_tokens, block_size)
    num_drawn = len(state.token_ids) - state.num_computed_tokens
    num_blocks = len(reservation.hit_names) + len(reservation.lease.block_ids)
    if held != num_blocks or num_drawn not in (0, 1):
        raise InvalidRequest(
            f"the state of {state.key} has {len(state.token_ids)} tokens and KV of {state.num_computed_tokens}, "
            f"the lease {num_blocks} blocks, {len(reservation.hit_names)} of them prefix hits",
            param="num_computed_tokens",
        )
    _check_hits(state, chain, reservation)
    sequence = Sequence(
        state.key,
        list(state.token_ids[: state.num_computed_tokens]),
        state.num_prompt_tokens,
        state.sampling,
        num_computed_tokens=state.num_computed_tokens,
        num_cached_tokens=state.num_cached_tokens,
        chain=chain,
        num_named_blocks=len(reservation.hit_names),
    )
    return Live(
        sequence,
        state.gateway,
        deadline_at(state.deadline_s),
        msgspec.structs.replace(
            state.timings,
            transfer_s=max(0.0, time.time() - state.sampled_at_unix_s),
            kv_bytes=commit.num_bytes,
            transport=reservation.receiver.kind,
        ),
        Label.of(state.cache_salt or "", state.conversation, state.timings.traffic_class),
        state.slo,
        num_offered_blocks=state.num_computed_tokens // block_size,  # prefill does, as it computes them
        arrival=Arrival(
            token_id=state.token_ids[-1] if num_drawn else None,
            logprob=state.first_logprob,
            prompt_logprobs=state.prompt_logprobs,
            hidden=state.last_hidden,
            hidden_dtype=state.last_hidden_dtype,
        ),
    )


def _check_hits(state: SequenceState, chain: Chain | None, reservation: Reservation) -> None:
    """The blocks were chosen by names that prefill gave; what they must hold is known only now."""
    names = [] if chain is None else chain.hashes[: len(reservation.hit_names)]
    if names != reservation.hit_names:
        pairs = zip(reservation.hit_names, names, strict=False)
        right = next((i for i, (hit, name) in enumerate(pairs) if hit != name), len(names))
        raise KVError(
            f"the lease of {state.key} was asked for with {len(reservation.hit_names)} block hashes that are here, and "
            f"hash {right} is not that of its tokens",
            num_blocks=right,
            expected=len(reservation.hit_names),
        )
