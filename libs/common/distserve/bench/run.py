"""One measurement from the first look at the servers to the document."""

from __future__ import annotations

import asyncio
import gc
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from distserve import __version__
from distserve.bench.answers import Result, result
from distserve.bench.body import Form
from distserve.bench.client import Pool
from distserve.bench.client_use import ClientUse, ClientWatch
from distserve.bench.compare import ratios, slices
from distserve.bench.document import ClientInfo, Document, Side
from distserve.bench.drive import Course, Limits, drive
from distserve.bench.floor import Floor, measure_floor
from distserve.bench.hardware import hardware
from distserve.bench.options import Options
from distserve.bench.prompts import Words
from distserve.bench.server import Target
from distserve.bench.summary import Window, summarise
from distserve.bench.traffic import Traffic
from distserve.bench.warnings import server_warnings

Say = Callable[[str], None]
FLOOR_STREAMS = 64  # the most of the client's own measurement
NAMES = ("A", "B")


async def run(options: Options, say: Say) -> Document:
    """`say`: a line of progress. Raises BadOption, InvalidRequest, Unavailable."""
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    with ExitStack() as stack:
        targets = [_target(options, i, stack) for i in range(len(options.addresses))]
        for target in targets:
            await target.look()
            await target.settle()
            await target.measure_words(options.raw.tokenizer)
        await _agree_on_words(targets, options)
        floor = await _floor(options, say)
        async with ClientWatch() as watch:
            with collector_off():
                runs = await (_compared if len(targets) > 1 else _alone)(targets, options, say)
    return _document(options, began, targets, runs, watch, floor)


def _target(options: Options, number: int, stack: ExitStack) -> Target:
    address = options.addresses[number]
    pool = Pool(address, fresh=options.raw.fresh)
    stack.callback(pool.close)
    return Target(pool, Form(address, options.endpoint, options.model, options.headers, options.extra, options.promise))


async def _agree_on_words(targets: Sequence[Target], options: Options) -> None:
    """Servers that are compared get the same texts: of the words that are a token to each of them."""
    first, *others = targets
    for other in others:
        assert first.words is not None
        await other.measure_words(options.raw.tokenizer, first.words.words)
        assert other.words is not None
        if first.words.is_exact and other.words.is_exact:
            first.words = Words(other.words.words, first.words.overhead, first.words.source)
        else:
            first.words, other.words = replace(first.words, is_exact=False), replace(first.words, is_exact=False)


async def _floor(options: Options, say: Say) -> Floor | None:
    if not options.raw.floor:
        return None
    say("measuring the client alone")
    return await measure_floor(min(FLOOR_STREAMS, options.traffic.concurrency or 8))


async def _alone(targets: Sequence[Target], options: Options, say: Say) -> list[tuple[str, Course]]:
    say(f"{options.traffic}: {_amount(options.limits)}")
    return [("", await _drive(targets[0], options.traffic, options.limits))]


async def _compared(targets: Sequence[Target], options: Options, say: Say) -> list[tuple[str, Course]]:
    """The same slices of traffic to each, in the order A B, B A, A B …: what changes with time hits both alike."""
    limits, num = options.limits, options.raw.slices
    say(f"{options.traffic}: {num} slices each, {_amount(limits)}")
    warm = Limits(limits.warm_requests or None, limits.warm_s or None, deadline_s=limits.deadline_s)
    if limits.warm_requests or limits.warm_s:
        for target in targets:
            await _drive(target, replace(options.traffic, part=-1), warm)
    runs = []
    for i, (traffic, own) in enumerate(slices(options.traffic, limits, num)):
        for name, target in sorted(zip(NAMES, targets, strict=True), reverse=bool(i % 2), key=lambda pair: pair[0]):
            runs.append((name, await _drive(target, traffic, own)))
        say(f"slice {i + 1} of {num}")
    return runs


async def _drive(target: Target, traffic: Traffic, limits: Limits) -> Course:
    form, words = target.form, target.words
    assert words is not None
    return await drive(target.pool, traffic, lambda ask: form.ask(words, ask), limits)


def _amount(limits: Limits) -> str:
    parts = [f"{limits.num_requests} requests"] if limits.num_requests else []
    parts += [f"{limits.duration_s:g} s"] if limits.duration_s else []
    warm = f"{limits.warm_requests} requests" if limits.warm_requests else f"{limits.warm_s:g} s"
    return f"{' within '.join(parts) or 'the whole trace'}, after {warm} of warm-up"


@contextmanager
def collector_off() -> Iterator[None]:
    """No pause of the garbage collector within the measurement: nothing there makes cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ---------------------------------------------------------------- afterwards


def _document(
    options: Options,
    began: str,
    targets: Sequence[Target],
    runs: Sequence[tuple[str, Course]],
    watch: ClientWatch,
    floor: Floor | None,
) -> Document:
    zero_s = min(course.began_s for _, course in runs)
    results: list[Result] = []
    windows: dict[str, list[Window]] = {}
    for name, course in runs:
        found = [result(a, e, due_s=due, began_s=zero_s, server=name) for a, due, e in course.done]
        results += sorted(found, key=lambda r: r.due_s)
        begin, end = course.window()
        windows.setdefault(name, []).append((begin - zero_s, end - zero_s))
    is_open = options.traffic.is_open
    sides = []
    for name, target in zip(NAMES if len(targets) > 1 else ("",), targets, strict=True):
        mine = [r for r in results if r.server == name]
        summary = summarise(mine, windows[name], options.slo, is_open=is_open)
        sides.append(Side(name=name, server=target.info(), windows=windows[name], summary=summary))
    use = _use(watch, [course for _, course in runs], results if is_open else [])
    return Document(
        began=began,
        traffic=str(options.traffic),
        is_open=is_open,
        slo=options.slo,
        client=ClientInfo(
            version=__version__,
            python=platform.python_version(),
            loop=type(asyncio.get_running_loop()).__module__.partition(".")[0],
            hardware=hardware(),
            options=options.shown,
            use=use,
            floor=floor,
        ),
        sides=sides,
        warnings=[*use.warnings(), *(w for side in sides for w in server_warnings(side))],
        ratios=ratios(sides, results) if len(sides) > 1 else [],
        results=results,
    )


def _use(watch: ClientWatch, courses: Sequence[Course], results: Sequence[Result]) -> ClientUse:
    late = [r.sent_s - r.due_s for r in results if r.sent_s is not None and r.due_s >= 0]
    return watch.use([course.window() for course in courses], late)
