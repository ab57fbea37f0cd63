"""What goes to a decode worker that has a prompt's beginning already."""

from bisect import bisect_left

from distserve.transport.base import Span


def beyond(span: Span, num_hit_blocks: int) -> Span | None:
    """The span, whose targets are block numbers of the prompt, ascending, as a lease wants it that begins after the
    prompt's first num_hit_blocks blocks. None if nothing is left of it."""
    if not num_hit_blocks:
        return span
    first = bisect_left(span.targets, num_hit_blocks)
    if first == len(span.targets):
        return None
    targets = tuple(target - num_hit_blocks for target in span.targets[first:])
    return Span(span.layer_start, span.layer_stop, span.source_blocks[first:], targets)
