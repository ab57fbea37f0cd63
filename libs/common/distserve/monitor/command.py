"""What `distserve monitor` does: on a terminal a picture that renews itself, elsewhere lines."""

from __future__ import annotations

import os
import shutil
import sys

from rich.console import Console
from typer import BadParameter

from distserve.monitor.lines import documents, pictures
from distserve.monitor.pace import Pace
from distserve.monitor.series import series
from distserve.monitor.source import Source
from distserve.monitor.words import interval as parsed

PLAIN_WIDTH = 100  # characters, where nothing says how wide the output is


def run_monitor(
    url: str, api_key: str = "", *, interval: str = "1s", once: bool = False, as_json: bool = False, metric: str = ""
) -> int:
    """Returns the exit status. Raises ConfigError, BadParameter, Unauthorized, Forbidden; with `once` Unavailable."""
    if as_json and metric:
        raise BadParameter("--json and --metric: one of them")
    try:
        interval_s = parsed(interval)
    except ValueError as e:
        raise BadParameter(f"--interval {e}") from None
    source = Source(url, api_key)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")  # where the locale has no bars
    try:
        if as_json:
            documents(source, Pace(interval_s, once), say)
        elif metric:
            series(source, metric, Pace(interval_s, once), say)
        elif once or not sys.stdout.isatty():
            pictures(source, Pace(interval_s, once), Console(width=_width(), highlight=False))
        else:
            from distserve.monitor.screen import watch

            return watch(source, interval_s, Console(highlight=False))
    except BrokenPipeError:  # `distserve monitor --json | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at exit
    return 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _width() -> int:
    return shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns
