"""When a sequence ends by itself. (Stop strings are the gateway's: it has the tokenizer.)"""

from collections.abc import Collection

from distserve.engine.sequence import Sequence
from distserve.messages import FinishReason


def finish_reason(
    sequence: Sequence, new_token: int, eos_token_ids: Collection[int], max_model_len: int
) -> FinishReason | None:
    """Why `sequence` ends with `new_token`, which is the next one and not yet in its token_ids; None to go on.

    "stop" for eos (unless ignore_eos) and stop token ids, once the output with this token is longer than min_tokens.
    "length" when max_tokens are generated or max_model_len tokens, prompt included, are reached; "stop" comes first.
    A negative id, which the sampler gives for a row of logits that is not finite, is "error".
    """
    p = sequence.sampling
    if new_token < 0:
        return "error"
    ends = new_token in p.stop_token_ids or (new_token in eos_token_ids and not p.ignore_eos)
    if ends and sequence.num_output_tokens >= p.min_tokens:
        return "stop"
    if sequence.num_output_tokens + 1 >= p.max_tokens or len(sequence.token_ids) + 1 >= max_model_len:
        return "length"
    return None
