"""Which submissions a worker can take at all, whatever its load."""

from distserve.errors import InvalidRequest, Overloaded
from distserve.messages import SubmitRequest


def check_prompt(request: SubmitRequest, max_model_len: int) -> None:
    """Raises InvalidRequest unless token_ids holds the prompt and leaves room for a token within max_model_len."""
    num = len(request.token_ids)
    if not request.num_prompt_tokens <= num < max_model_len:
        raise InvalidRequest(
            f"token_ids has {num} tokens, must have at least num_prompt_tokens ({request.num_prompt_tokens}) "
            f"and fewer than the model's {max_model_len}",
            param="token_ids",
        )


def check_queue(num_waiting: int, max_waiting: int) -> None:
    """Raises Overloaded if the queue is full."""
    if num_waiting >= max_waiting:
        raise Overloaded(f"{num_waiting} sequences wait here, the limit is {max_waiting}", retry_after_s=1.0)
