"""The picture that renews itself on a terminal, until q or Ctrl-C."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live

from distserve.monitor.picture import Picture
from distserve.monitor.source import Source
from distserve.monitor.terminal import Waker, keys
from distserve.monitor.watching import Watching
from distserve.monitor.words import seconds

_REDRAW_S = 1.0  # at the least: the age of an old picture grows


def watch(source: Source, interval_s: float, console: Console) -> int:
    """Exit status. Raises Unauthorized or Forbidden, once the terminal is as it was."""
    waker = Waker()
    refused = None
    try:
        with (
            keys(waker) as pressed,
            Watching(source, interval_s, waker.wake) as watching,
            Live(
                console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            ) as live,
        ):
            while True:
                view = watching.view
                if refused := view.refused:
                    break
                picture = Picture(
                    view.status,
                    console.size.height,
                    trouble=view.trouble,
                    age_s=time.monotonic() - view.taken_at,
                    foot=f"q quits   every {seconds(interval_s)}   {source.url}",
                )
                live.update(picture, refresh=True)
                if pressed.wait(_REDRAW_S).lower().startswith("q"):
                    break
    except KeyboardInterrupt:  # the other way to end it
        return 0
    finally:
        waker.close()
    if refused is not None:
        raise refused
    return 0
