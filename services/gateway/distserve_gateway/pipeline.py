"""What a door needs: body in, Answer and Renderer out. HTTP and NATS have one each, over the same collaborators."""

import time
from dataclasses import replace

from distserve.api_keys import ApiKey
from distserve.errors import DistServeError
from distserve.messages import Priority
from distserve_gateway.calls import Call, Kind
from distserve_gateway.envelope import NONE, Envelope
from distserve_gateway.intake import Intake
from distserve_gateway.keys import Keys
from distserve_gateway.metrics import Metrics
from distserve_gateway.permits import Permit, Permits
from distserve_gateway.placement import Placed, Placement
from distserve_gateway.rendering import RENDERERS, Renderer
from distserve_gateway.running import Run, Running
from distserve_gateway.submission import Submission
from distserve_gateway.tokenizing import ModelTokenizer


class Pipeline:
    def __init__(
        self,
        intake: Intake,
        tokenizer: ModelTokenizer,
        submission: Submission,
        placement: Placement,
        metrics: Metrics,
        running: Running,
        keys: Keys,
        permits: Permits,
    ) -> None:
        self.intake = intake
        self.tokenizer = tokenizer
        self.running = running
        self.keys = keys
        self._permits = permits
        self._submission = submission
        self._placement = placement
        self._metrics = metrics

    async def begin(self, kind: Kind, body: bytes, envelope: Envelope = NONE, key: ApiKey | None = None) -> Renderer:
        """Validate, tokenise and submit; the renderer's answer is running. `envelope`: what came beside it; `key`:
        whose it is, None: it is asked for. Raises DistServeError kinds."""
        with envelope.trace.admission():
            call, permit, run, placed = await self._let_in(kind, body, envelope, key)
            call.trace.let_in(call)
        answer = self._placement.answer(placed, call, body, run, permit)
        try:
            await answer.start()
            return RENDERERS[kind](answer)
        except BaseException:
            answer.close()
            raise

    async def _let_in(
        self, kind: Kind, body: bytes, envelope: Envelope, key: ApiKey | None
    ) -> tuple[Call, Permit, Run, Placed]:
        """Permit, run and place are the caller's: an answer ends all three."""
        received_at = time.monotonic()
        parse = {"chat": self.intake.chat, "completion": self.intake.completion, "generate": self.intake.generate}
        self._metrics.started()
        priority: Priority = "normal"
        try:
            key = key or self.keys.of(envelope.authorization)
            priority = key.default_priority
            permit = self._permits.open(key)
            try:
                with self._submission.entering():
                    parsed = await parse[kind](body, envelope, key, permit.work)
                call = replace(parsed, received_at=received_at, trace=envelope.trace)
                priority = call.terms.priority
                permit.charge(call.num_prompt_tokens, call.max_output_tokens)
                run = self.running.open(call, envelope.request_id)
                try:
                    placed = await self._placement.of(call, envelope, run)
                except BaseException:
                    run.close()
                    raise
            except BaseException as e:
                permit.refused(e)
                raise
        except DistServeError as e:
            self._metrics.refused(kind, e, priority)
            raise
        except BaseException as e:
            self._metrics.dropped(kind, e)
            raise
        return call, permit, run, placed
