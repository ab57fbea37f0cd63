"""Streamed completions of one text, and a worker that never answers: what tests of losses have in common."""

import asyncio
import json
from typing import Any

from distserve.bus.base import Delivery
from distserve.messages import (
    CancelRequest,
    SequenceKey,
    StatusRequest,
    SubmitReply,
    SubmitRequest,
    decode,
    encode,
)
from tests.unit.gateway.scripted import Cluster

TEXT = "The capital of France is Paris, and the rest of this answer is here too."
BODY = {"prompt": "a", "max_tokens": 99, "stream": True}


async def ask(cluster: Cluster, **fields: Any) -> list[Any]:
    """The events of a streamed completion, `[DONE]` included."""
    async with cluster.client() as client:
        response = await client.post("/v1/completions", json=BODY | fields)
        assert response.status_code == 200, response.text
        parts = response.text.split("\n\n")[:-1]
        return [p[6:] if p.endswith("[DONE]") else json.loads(p[6:]) for p in parts]


def text_of(events: list[Any]) -> str:
    return "".join(e["choices"][0]["text"] for e in events if e != "[DONE]" and "choices" in e)


class SilentWorker:
    """Takes a submission and every question, and never answers; its heartbeat may go on."""

    def __init__(self, *, accepts: bool) -> None:
        self.accepts = accepts
        self.cancelled: list[SequenceKey] = []
        self.submitted: list[SequenceKey] = []
        self.questions = 0

    async def __call__(self, delivery: Delivery) -> bytes:
        message = decode(delivery.data)
        if isinstance(message, SubmitRequest):
            self.submitted.append(message.key)
            if self.accepts:
                return encode(SubmitReply())
        if isinstance(message, CancelRequest):
            self.cancelled += message.keys
            return b""
        self.questions += isinstance(message, StatusRequest)
        await asyncio.Event().wait()
        return b""
