"""What a prefill worker can do, and how."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    max_waiting: int
    span_bytes: int
    sample_on_decode: bool  # the first token is drawn by decode from the last hidden state
    hidden_dtype: str
