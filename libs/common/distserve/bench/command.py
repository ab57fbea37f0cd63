"""`distserve bench URL`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distserve.console import Console

if TYPE_CHECKING:
    from distserve.bench.document import Document
    from distserve.bench.options import Options

KEY_VARIABLE = "OPENAI_API_KEY"


def bench(
    url: Annotated[str, typer.Argument(metavar="URL", help="http://HOST:PORT of a server with OpenAI's API.")],
    rate: Annotated[float | None, typer.Option("--rate", help="Open loop: requests a second, Poisson.")] = None,
    constant: Annotated[bool, typer.Option("--constant", help="With --rate: evenly instead.")] = False,
    concurrency: Annotated[int | None, typer.Option("--concurrency", help="Closed loop: so many at once (1).")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Requests of a file in Mooncake's JSON lines.")] = None,
    speed: Annotated[float, typer.Option("--speed", help="With --trace: so many times as fast.")] = 1.0,
    requests: Annotated[int | None, typer.Option("--requests", help="So many are measured.")] = None,
    duration: Annotated[str, typer.Option("--duration", help="For so long, e.g. 60s (30s without --requests).")] = "",
    warmup: Annotated[str, typer.Option("--warmup", help="Left out at first: 5s, or 20 requests; 0: nothing.")] = "",
    input_: Annotated[
        str, typer.Option("--input", help="Prompt tokens: 512, uniform:min=..,max=.. or powerlaw:mean=..,max=..")
    ] = "",
    output: Annotated[str, typer.Option("--output", help="Answer tokens (128), in the same forms.")] = "",
    seed: Annotated[int, typer.Option("--seed", help="The same seed, the same traffic.")] = 0,
    endpoint: Annotated[str, typer.Option("--endpoint", help="chat or completions.")] = "chat",
    model: Annotated[str, typer.Option("--model", help="As the server calls it; else the first that it lists.")] = "",
    tokenizer: Annotated[Path | None, typer.Option("--tokenizer", help="Folder to count prompts by.")] = None,
    api_key: Annotated[str, typer.Option("--api-key", help=f"Else ${KEY_VARIABLE}.", show_default=False)] = "",
    header: Annotated[list[str] | None, typer.Option("--header", help="'Name: value'; may be repeated.")] = None,
    body: Annotated[list[str] | None, typer.Option("--body", help="name=JSON, another field; repeatable.")] = None,
    promise: Annotated[str, typer.Option("--promise", help="Sent as promises: ttft=300ms,tpot=50ms,e2e=5s.")] = "",
    slo: Annotated[str, typer.Option("--slo", help="Goodput is what keeps to: ttft=300ms,tpot=50ms,e2e=5s.")] = "",
    deadline: Annotated[str, typer.Option("--deadline", help="A request is given up after this long.")] = "120s",
    fresh: Annotated[bool, typer.Option("--fresh", help="A connection of its own for each request.")] = False,
    floor: Annotated[bool, typer.Option("--floor/--no-floor", help="Measure the client alone first.")] = True,
    compare: Annotated[str, typer.Option("--compare", metavar="URL2", help="A second server, same traffic.")] = "",
    slices: Annotated[int, typer.Option("--slices", help="With --compare: turns of each server.")] = 6,
    json: Annotated[Path | None, typer.Option("--json", help="Write everything there, every request too.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with pictures there.")] = None,
) -> None:
    """Put a load on a server with OpenAI's API and measure its latency and throughput (docs/bench.md).

    Exit status: 0 measured, 1 the server could not be measured or no request ended well, 2 a wrong option.
    """
    from distserve.bench.errors import BadOption
    from distserve.bench.options import Raw, check

    raw = Raw(
        url=url,
        compare=compare,
        rate=rate,
        constant=constant,
        concurrency=concurrency,
        trace=trace,
        speed=speed,
        requests=requests,
        duration=duration,
        warmup=warmup,
        input=input_,
        output=output,
        seed=seed,
        endpoint=endpoint,
        model=model,
        tokenizer=tokenizer,
        api_key=api_key or os.environ.get(KEY_VARIABLE, ""),
        header=header or (),
        body=body or (),
        promise=promise,
        slo=slo,
        deadline=deadline,
        fresh=fresh,
        floor=floor,
        slices=slices,
        json=json,
        html=html,
    )
    try:
        options = check(raw)
        _check_files(options)
        raise SystemExit(_measure(options))
    except BadOption as e:
        raise typer.BadParameter(str(e)) from None


def _check_files(options: Options) -> None:
    """Before anything is measured for nothing. Raises BadOption."""
    from distserve.bench.errors import BadOption

    for name, path in (("--json", options.raw.json), ("--html", options.raw.html)):
        if path is not None and not path.resolve().parent.is_dir():
            raise BadOption(name, path, f"there is no folder {path.resolve().parent}")
    if options.raw.html is not None:
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError:
            raise BadOption("--html", options.raw.html, "it needs matplotlib: pip install 'distserve[bench]'") from None


def _measure(options: Options) -> int:
    from distserve.bench.run import run
    from distserve.bench.text import lines

    console = Console()
    _raise_open_files()
    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        document = runner.run(run(options, lambda line: print(line, file=sys.stderr, flush=True)))
    for line in lines(document):
        console.say(line)
    _write(document, options, console)
    return 0 if all(side.summary.num_ok for side in document.sides) else 1


def _raise_open_files() -> None:
    """A connection is an open file: as many as the system allows, not only as many as a shell begins with."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _write(document: Document, options: Options, console: Console) -> None:
    import msgspec

    if options.raw.json is not None:
        options.raw.json.write_bytes(msgspec.json.encode(document))
        console.say(f"{options.raw.json}: every figure and request")
    if options.raw.html is not None:
        from distserve.bench.page import page

        options.raw.html.write_text(page(document))
        console.say(f"{options.raw.html}: the report")
