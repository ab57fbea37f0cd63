"""Opens, submits and ends the sequences of a request: what an Answer may do with the cluster."""

import asyncio
import time
from collections.abc import Iterable, Sequence

import msgspec

from distserve_gateway.admission import Admission
from distserve_gateway.calls import Call
from distserve_gateway.dispatch import Dispatch
from distserve_gateway.live import Inbox, LiveSequence
from distserve_gateway.streams import Streams


class Submission:
    def __init__(
        self, streams: Streams, dispatch: Dispatch, admission: Admission, *, request_timeout_s: float = 600.0
    ) -> None:
        self._streams = streams
        self._dispatch = dispatch
        self._admission = admission
        self._request_timeout_s = request_timeout_s

    def open(self, call: Call, inbox: Inbox) -> list[LiveSequence]:
        """One live sequence for each output, numbered flat over prompts and n. Raises what admission raises."""
        self._admission.check(call.num_outputs, len(self._streams))
        deadline = time.monotonic() + self._request_timeout_s
        sequences = []
        for i in range(call.num_outputs):
            prompt = call.prompts[i // call.n]
            # The noise counts over n alone, so that a prompt in a list draws what it draws alone.
            sampling = msgspec.structs.replace(prompt.sampling, stream=i % call.n)
            sequence = LiveSequence(
                call.request_id, i, prompt.token_ids, sampling, inbox, deadline, traffic_class=call.traffic_class
            )
            self._streams.add(sequence)
            sequences.append(sequence)
        return sequences

    async def submit(self, sequences: Sequence[LiveSequence]) -> None:
        """Returns when all are accepted. The first refusal is raised; what was accepted is up to the caller to stop."""
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

    def eos_token_ids(self, sequence: LiveSequence) -> frozenset[int]:
        return frozenset(self._streams.workers.eos_token_ids(sequence.decode_worker))

    def stop(self, sequence: LiveSequence, reason: str) -> None:
        self._streams.stop(sequence, reason)

    def close(self, sequences: Iterable[LiveSequence], reason: str) -> None:
        for sequence in sequences:
            self._streams.stop(sequence, reason)
