"""One request in its trace: the root span, what is known of the request, and whether it is kept outside the ratio."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from distserve.errors import DistServeError, RateLimited
from distserve.telemetry import NO_SPAN, Span, begin, finish, is_undecided, let_go

if TYPE_CHECKING:
    from distserve_gateway.calls import Call
    from distserve_gateway.ended import Ended

TOO_MANY_REQUESTS = 429


def is_clients_own(error: DistServeError) -> bool:
    """It was asked for wrongly, too often, or no longer. Words about it may repeat what its client wrote."""
    return error.http_status < 500 and (error.http_status != TOO_MANY_REQUESTS or isinstance(error, RateLimited))


def words_for_others(error: DistServeError) -> str:
    """What is wrong, for whoever may look, and not its client alone: nothing that may repeat the prompt."""
    if (server := error.fields.get("fallback")) is not None:
        return f"the fallback server {server} failed"
    return error.code if is_clients_own(error) else error.message


def end_span(span: Span, error: DistServeError | None = None) -> None:
    """End it, once. What is the client's own fault is named, and no failure of the span's."""
    if error is None:
        finish(span)
    elif is_clients_own(error):
        finish(span, attributes={"error.type": error.code})
    elif "fallback" in error.fields:
        finish(span, error=type(error)(words_for_others(error)))
    else:
        finish(span, error=error)


class RequestTrace:
    """Its door begins it and calls finish(), once, whatever happens; `root` is the parent of all else. on_kept: told
    of the root of one that is to be exported, though outside the ratio."""

    __slots__ = ("_admission", "_error", "_is_late", "_on_kept", "_outcome", "root")

    def __init__(self, root: Span, on_kept: Callable[[Span], None] = lambda root: None) -> None:
        self.root = root
        self._on_kept = on_kept
        self._admission = NO_SPAN
        self._error: DistServeError | None = None
        self._outcome = ""
        self._is_late = False

    def admission(self) -> AbstractContextManager[None]:
        """Around all that is done before it is let in; let_in() says so."""
        return self._admitting()

    @contextmanager
    def _admitting(self) -> Iterator[None]:
        self._admission = span = begin("admission", self.root)
        try:
            yield
        except DistServeError as e:
            self.failed(e)
            end_span(span, e)
            raise
        finally:
            finish(span)

    def let_in(self, call: "Call") -> None:
        if not self.root.is_recording():
            return
        self._admission.set_attribute("distserve.admission.tokens", call.num_prompt_tokens)
        sampling = call.prompts[0].sampling
        self.root.set_attributes(
            {
                "distserve.request_id": call.request_id,
                "distserve.priority": call.terms.priority,
                "gen_ai.request.choice.count": call.n,
                "gen_ai.request.max_tokens": call.prompts[0].max_tokens,
                "gen_ai.request.stream": call.stream,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.top_k": sampling.top_k,
                "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
                "gen_ai.request.presence_penalty": sampling.presence_penalty,
                "gen_ai.usage.input_tokens": call.num_prompt_tokens,
            }
        )
        for name in ("ttft", "tpot", "deadline"):
            if (promised_s := getattr(call.terms, f"{name}_s")) is not None:
                self.root.set_attribute(f"distserve.{name}_slo_s", promised_s)

    def late(self) -> None:
        """A promise is broken already: workers are told now, since what they hold does not wait for long answers."""
        if not self._is_late:
            self._is_late = True
            self._keep()

    def failed(self, error: Exception) -> None:
        """It ends with this error. The first one counts."""
        if self._error is None:
            self._error = error if isinstance(error, DistServeError) else DistServeError("internal error")

    def ended(self, ended: "Ended") -> None:
        """Its answer has, and what is known of it then."""
        self._outcome = ended.outcome
        if ended.error is not None:
            self.failed(ended.error)
        attained = "" if ended.is_refused else ended.attained
        if attained == "no":
            self.late()
        if not self.root.is_recording():
            return
        self.root.set_attributes(
            {
                "gen_ai.response.id": ended.call.request_id,
                "gen_ai.response.model": ended.call.model,
                "gen_ai.response.finish_reasons": ended.finish_reasons,
                "gen_ai.usage.output_tokens": ended.num_output_tokens,
                "gen_ai.usage.cache_read.input_tokens": ended.num_cached_tokens,
            }
        )
        if ended.ttft_s is not None:
            self.root.set_attribute("gen_ai.server.time_to_first_token", round(ended.ttft_s, 6))
        if ended.tpot_s is not None:
            self.root.set_attribute("gen_ai.server.time_per_output_token", round(ended.tpot_s, 6))
        if attained:
            self.root.set_attribute("distserve.slo_attained", attained)

    def finish(self, status: int | None = None) -> None:
        """End the root. status: of the answer over HTTP; None: none was sent, or it has another door."""
        root, error = self.root, self._error
        self._error = None  # its frames hold the prompt
        if not root.is_recording():
            return
        if status is not None:
            root.set_attribute("http.response.status_code", status)
            if error is None and status >= 500:
                error = DistServeError("internal error")
        without_answer = "cancelled" if status is None else f"http_{status}"
        root.set_attribute("distserve.outcome", error.code if error else self._outcome or without_answer)
        undecided = is_undecided(root)
        if self._is_late or (error is not None and not is_clients_own(error)):
            self._keep()  # when it was late, again: a worker may have forgotten that during a long answer
        end_span(root, error)
        if undecided:
            let_go(root)

    def _keep(self) -> None:
        if is_undecided(self.root):
            self._on_kept(self.root)


class _NoTrace(RequestTrace):
    """Shared by all requests that are not traced: it keeps nothing."""

    __slots__ = ()

    def admission(self) -> AbstractContextManager[None]:
        return nullcontext()

    def let_in(self, call: "Call") -> None: ...

    def late(self) -> None: ...

    def failed(self, error: Exception) -> None: ...

    def ended(self, ended: "Ended") -> None: ...

    def finish(self, status: int | None = None) -> None: ...


NO_TRACE: RequestTrace = _NoTrace(NO_SPAN)
