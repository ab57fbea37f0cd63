"""What a door needs: body in, Answer and Renderer out. HTTP and NATS have one each, over the same collaborators."""

from distserve.errors import DistServeError
from distserve_gateway.answer import Answer
from distserve_gateway.calls import Kind
from distserve_gateway.intake import Intake
from distserve_gateway.metrics import Metrics
from distserve_gateway.rendering import RENDERERS, Renderer
from distserve_gateway.submission import Submission
from distserve_gateway.tokenizing import ModelTokenizer


class Pipeline:
    def __init__(self, intake: Intake, tokenizer: ModelTokenizer, submission: Submission, metrics: Metrics) -> None:
        self.intake = intake
        self.tokenizer = tokenizer
        self._submission = submission
        self._metrics = metrics

    async def begin(self, kind: Kind, body: bytes, *, session_id: str = "") -> Renderer:
        """Validate, tokenise and submit; the renderer's answer is running. `session_id`: what the header says.
        Raises DistServeError kinds."""
        parse = {"chat": self.intake.chat, "completion": self.intake.completion, "generate": self.intake.generate}
        try:
            call = await parse[kind](body, session_id)
        except DistServeError as e:
            self._metrics.refused(kind, e.code)
            raise
        answer = Answer(call, self.tokenizer, self._submission, self._metrics)
        await answer.start()
        return RENDERERS[kind](answer, self.tokenizer)
