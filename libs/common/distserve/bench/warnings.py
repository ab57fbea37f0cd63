"""What a reader of one server's figures should know before believing them."""

from __future__ import annotations

from distserve.bench.document import Side

_SHARE = 0.99  # of requests that should be as they were asked for
_CACHED = 0.05  # of prompt tokens, from which on it is worth a word


def server_warnings(side: Side) -> list[str]:
    s, found = side.summary, []
    if not s.num_requests:
        found.append("no request was due in the window: measure for longer, or at a higher rate")
    elif not s.num_ok:
        found.append("no request ended well")
    elif s.num_ok < _SHARE * s.num_requests:
        found.append(
            f"{s.num_requests - s.num_ok} of {s.num_requests} requests failed: latencies are those of the rest, and "
            "look better than what was served"
        )
    if s.num_ok and not s.num_input_told:
        found.append("the server tells no usage: lengths of prompts were not checked, and events count as tokens")
    elif s.num_input_told and s.num_input_as_asked < _SHARE * s.num_input_told:
        found.append(
            f"{s.num_input_told - s.num_input_as_asked} of {s.num_input_told} prompts were not as long as asked "
            f"(mean {s.input_mean:.1f} tokens; lengths: {side.server.lengths_by})"
        )
    if s.num_output_told and s.num_output_as_asked < _SHARE * s.num_output_told:
        found.append(
            f"{s.num_output_told - s.num_output_as_asked} of {s.num_output_told} answers were not as long as asked "
            f"(mean {s.output_mean:.1f} tokens): the server does not keep to ignore_eos"
        )
    if (s.tokens_per_event or 1.0) > 1.05:
        how = "share the pause before them" if "usage" in s.counted else "can't be told apart: ITL is between events"
        found.append(f"an event brings {s.tokens_per_event:.2f} tokens on average; tokens that come together {how}")
    if s.num_ok and not s.latencies["itl"].num and (s.output_mean or 0) > 1:
        found.append("all tokens of an answer came at once: the server does not stream, and there is no ITL or TPOT")
    if s.cached_share and s.cached_share > _CACHED:
        found.append(
            f"{s.cached_share:.0%} of prompt tokens were in the server's prefix cache: a template's beginning, shared "
            "blocks of a trace, or the same seed sent before (take another --seed)"
        )
    return [f"{side.name}: {text}" if side.name else text for text in found]
