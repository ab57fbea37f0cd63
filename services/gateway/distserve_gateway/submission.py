"""Opens, submits and ends the sequences of a request: what an Answer may do with the cluster."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import msgspec

from distserve_gateway.admission import Admission
from distserve_gateway.affinity import Affinity
from distserve_gateway.calls import Call
from distserve_gateway.dispatch import Dispatch
from distserve_gateway.live import Inbox, LiveSequence
from distserve_gateway.prefixes import Prefixes
from distserve_gateway.streams import Streams


class Submission:
    """`prefixes` tells who holds what of a prompt, `affinity` keeps where conversations ran."""

    def __init__(
        self,
        streams: Streams,
        dispatch: Dispatch,
        admission: Admission,
        *,
        prefixes: Prefixes,
        affinity: Affinity,
        request_timeout_s: float = 600.0,
    ) -> None:
        self._prefixes = prefixes
        self._affinity = affinity
        self._streams = streams
        self._dispatch = dispatch
        self._admission = admission
        self._request_timeout_s = request_timeout_s

    def entering(self) -> AbstractContextManager[None]:
        """Around the work of taking a request in. Raises what admission raises."""
        return self._admission.entering()

    def open(self, call: Call, inbox: Inbox) -> list[LiveSequence]:
        """One live sequence for each output, numbered flat over prompts and n. Raises what admission raises."""
        self._admission.check(call.num_outputs, len(self._streams))
        limit_s = self._request_timeout_s
        deadline = call.received_at + min(limit_s if call.terms.deadline_s is None else call.terms.deadline_s, limit_s)
        sequences = []
        for i in range(call.num_outputs):
            prompt = call.prompts[i // call.n]
            # The noise counts over n alone, so that a prompt in a list draws what it draws alone.
            sampling = msgspec.structs.replace(prompt.sampling, stream=i % call.n)
            sequence = LiveSequence(
                call.request_id,
                i,
                prompt.token_ids,
                sampling,
                inbox,
                deadline,
                traffic_class=call.traffic_class,
                cache_salt=call.cache_salt,
                conversation=call.conversation,
                terms=call.terms,
                received_at=call.received_at,
                trace=call.trace.root,
            )
            self._streams.add(sequence)
            sequences.append(sequence)
        return sequences

    async def submit(self, sequences: Sequence[LiveSequence]) -> None:
        """Returns when all are accepted. The first refusal is raised; what was accepted is up to the caller to stop."""
        await self._look_up(sequences)
        if len(sequences) == 1:
            await self._dispatch.submit(sequences[0])
            return
        tasks = [asyncio.create_task(self._dispatch.submit(sequence)) for sequence in sequences]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_up(self, sequences: Sequence[LiveSequence]) -> None:
        """Who holds what of their prompts; the outputs of one prompt share its list of ids, and the answer."""
        if not self._prefixes:
            return
        held: dict[int, dict[str, int]] = {}
        for sequence in sequences:
            if sequence.sampling.prompt_logprobs is not None:
                continue  # every token of it must be computed
            prompt = id(sequence.prompt_ids)
            if prompt not in held:
                if held:
                    await asyncio.sleep(0)
                held[prompt] = await self._prefixes.held(sequence.prompt_ids, sequence.cache_salt)
            sequence.held = held[prompt]

    def eos_token_ids(self, sequence: LiveSequence) -> frozenset[int]:
        return frozenset(self._streams.workers.eos_token_ids(sequence.decode_worker))

    def stop(self, sequence: LiveSequence, reason: str) -> None:
        self._streams.stop(sequence, reason)

    def close(self, sequences: Iterable[LiveSequence], reason: str) -> None:
        """Idempotent."""
        for i, sequence in enumerate(sequences):
            if i == 0 and sequence.accepted:
                # Prefill may have handed it to another decode worker than it was told: that one has the KV.
                self._affinity.note(
                    sequence.cache_salt, sequence.conversation, sequence.prefill_worker, sequence.decode_worker
                )
            self._streams.stop(sequence, reason)
