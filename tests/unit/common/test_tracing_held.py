"""Spans outside the ratio: held within bounds, by trace, until somebody says that they are kept."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import Span, set_span_in_context

from distserve.telemetry.held import HeldSpans
from distserve.telemetry.sampling import RequestSampler


class Exported(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        assert span.context is not None
        assert span.context.trace_flags.sampled, "what exports batches would drop it"
        self.spans.append(span)

    def names(self) -> list[str]:
        return [span.name for span in self.spans]


class World:
    """Spans of a tracer whose ratio is 0, held by a clock of the test's."""

    def __init__(self, **bounds: int) -> None:
        self.now = 100.0
        self.exported = Exported()
        self.held = HeldSpans(self.exported, 10.0, clock=lambda: self.now, **bounds)
        provider = TracerProvider(RequestSampler(0, records_all=True), shutdown_on_exit=False)
        provider.add_span_processor(self.held)
        self._tracer = provider.get_tracer("t")

    def begin(self, name: str, parent: Span | None = None) -> Span:
        return self._tracer.start_span(name, None if parent is None else set_span_in_context(parent))

    def trace(self, name: str, num: int = 1) -> int:
        """A trace of `num` spans that are over; its id."""
        root = self.begin(name)
        for i in range(num - 1):
            self.begin(f"{name}.{i}", root).end()
        root.end()
        return trace_id(root)


def trace_id(span: Span) -> int:
    return span.get_span_context().trace_id


def test_a_kept_span_is_the_same_but_for_its_flag() -> None:
    world = World()
    root = world.begin("root")
    child = world.begin("child", root)
    child.set_attribute("a", (1, 2))
    child.add_event("e")
    child.end()
    assert world.exported.spans == []
    world.held.keep([trace_id(root)])
    [span] = world.exported.spans
    assert span.context is not None
    assert span.parent is not None
    assert (span.name, span.context.span_id, span.parent.span_id) == (
        "child",
        child.get_span_context().span_id,
        root.get_span_context().span_id,
    )
    assert span.attributes == {"a": (1, 2)}
    assert [event.name for event in span.events] == ["e"]
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time >= span.start_time
    root.end()
    assert world.exported.names() == ["child", "root"]
    assert world.held.num_held == world.held.num_traces == 0


def test_it_is_forgotten_so_long_after_its_last_span_here() -> None:
    world = World()
    root = world.begin("root")
    world.begin("child", root).end()
    world.now += 1000  # a long request: one that is open is held
    world.trace("other")
    assert world.held.num_held == 2
    root.end()
    world.now += 9.9
    world.trace("another")
    world.held.keep([trace_id(root)])
    assert world.exported.names() == ["child", "root"]

    late = world.trace("late")
    world.now += 10.1
    world.held.keep([late])
    assert world.exported.names() == ["child", "root"]
    assert world.held.num_held == 0


def test_being_kept_is_forgotten_too() -> None:
    world = World()
    world.held.keep([7])
    assert world.held.is_kept(7)
    world.now += 10.1
    world.trace("other")
    assert not world.held.is_kept(7)


def test_one_that_is_kept_stays_so_while_something_of_it_is_open() -> None:
    """A first token was late, and the answer takes long: what ends with it belongs to the rest."""
    world = World()
    root = world.begin("root")
    stay = world.begin("stay", root)
    world.begin("admission", root).end()
    world.held.keep([7, trace_id(root)])
    for _ in range(5):
        world.now += 9.0
        world.trace("other")
    assert not world.held.is_kept(7)
    stay.end()
    root.end()
    assert world.exported.names() == ["admission", "stay", "root"]
    world.now += 9.9
    world.trace("other")
    assert world.held.is_kept(trace_id(root)), "what it leaves to be done may take a while yet"
    world.now += 10.1
    world.trace("other")
    assert not world.held.is_kept(trace_id(root))


def test_one_that_is_let_go_is_forgotten_unless_something_of_it_is_open() -> None:
    world = World()
    over, root = world.trace("over"), world.begin("root")
    world.begin("child", root).end()
    world.held.let_go(over)
    world.held.let_go(trace_id(root))
    world.held.let_go(12345)
    assert world.held.num_held == 1
    root.end()
    world.held.let_go(trace_id(root))
    assert (world.held.num_held, world.held.num_traces) == (0, 0)


def test_of_too_many_traces_the_oldest_that_is_over_goes_first() -> None:
    world = World(max_traces=3)
    opened = world.begin("open")
    ids = [world.trace(name) for name in "abcd"]
    assert world.held.num_traces == 3
    world.held.keep(ids)
    assert world.exported.names() == ["c", "d"]
    opened.end()
    world.held.keep([trace_id(opened)])
    assert world.exported.names() == ["c", "d", "open"]


def test_too_many_that_are_open_are_bounded_too() -> None:
    world = World(max_traces=3)
    roots = [world.begin(name) for name in "abcde"]
    assert world.held.num_traces == 3
    for root in roots:
        root.end()
    assert world.held.num_held == 3
    world.held.keep(map(trace_id, roots))
    assert world.exported.names() == ["c", "d", "e"]


def test_spans_are_bounded_in_all_and_in_one_trace() -> None:
    world = World(max_spans=10, max_spans_of_one=6)
    long = world.trace("long", 50)
    assert world.held.num_held == 6
    ids = [world.trace(str(i), 3) for i in range(10)]
    assert world.held.num_held == 9
    world.held.keep([long, *ids])
    assert len(world.exported.spans) == 9
    assert world.held.num_held == 0


@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "keep", "let_go", "wait"]), st.integers(0, 5)), max_size=60))
def test_it_never_holds_more_than_it_may_and_exports_nothing_twice(acts: list[tuple[str, int]]) -> None:
    world = World(max_traces=3, max_spans=5, max_spans_of_one=3)
    roots: list[Span] = []
    open_spans: list[Span] = []
    for act, n in acts:
        if act == "begin":
            parent = roots[n % len(roots)] if roots and n else None
            span = world.begin("s", parent)
            open_spans.append(span)
            if parent is None:
                roots.append(span)
        elif act == "end" and open_spans:
            open_spans.pop(n % len(open_spans)).end()
        elif act == "keep" and roots:
            world.held.keep([trace_id(roots[n % len(roots)])])
        elif act == "let_go" and roots:
            world.held.let_go(trace_id(roots[n % len(roots)]))
        elif act == "wait":
            world.now += 3 * n
        assert 0 <= world.held.num_held <= 5
        assert world.held.num_traces <= 3
    for span in open_spans:
        span.end()
    world.now += 100
    world.held.keep([])
    assert (world.held.num_held, world.held.num_traces) == (0, 0)
    span_ids = [span.context.span_id for span in world.exported.spans if span.context is not None]
    assert len(span_ids) == len(set(span_ids))


@pytest.mark.parametrize("kept", [True, False])
def test_threads_may_end_spans_while_others_are_kept(kept: bool) -> None:
    world = World()
    root = world.begin("root")

    def work() -> None:
        for _ in range(200):
            world.begin("s", root).end()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    if kept:
        world.held.keep([trace_id(root)])
    for thread in threads:
        thread.join()
    root.end()
    assert len(world.exported.spans) + world.held.num_held == 801
    assert bool(world.exported.spans) is kept
