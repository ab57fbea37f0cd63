"""Lines on the terminal: each service's with its coloured prefix, ours without."""

import sys
from collections.abc import Callable, Iterable
from typing import TextIO

_COLOURS = (36, 33, 32, 35, 34, 31)  # cyan, yellow, green, magenta, blue, red
_DIM, _BOLD = 2, 1


class Console:
    """Writes to a stream; colours only on a terminal. `on_closed` is called once when nobody reads any more."""

    def __init__(self, names: Iterable[str] = (), *, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._colour = self._stream.isatty()
        self._closed = False
        self.on_closed: Callable[[], object] = lambda: None
        self.name_services(names)

    def name_services(self, names: Iterable[str]) -> None:
        """Give each name its colour and all the same width."""
        names = list(names)
        self._width = max((len(n) for n in names), default=0)
        self._codes = {n: _COLOURS[i % len(_COLOURS)] for i, n in enumerate(names)}

    def emit(self, name: str, line: str) -> None:
        """A service's line; with name "" one of ours."""
        if not name:
            self.say(self.paint(f"distserve: {line}", _BOLD))
            return
        prefix = f"{name:<{self._width}} |"
        self.say(f"{self.paint(prefix, self._codes.get(name, _DIM))} {line}")

    def say(self, line: str = "", *, end: str = "\n") -> None:
        if self._closed:
            return
        try:
            self._stream.write(line + end)
            self._stream.flush()
        except BrokenPipeError:  # `distserve up | head`: stop rather than run on unseen
            self._closed = True
            self.on_closed()

    def dim(self, text: str) -> str:
        return self.paint(text, _DIM)

    def bold(self, text: str) -> str:
        return self.paint(text, _BOLD)

    def paint(self, text: str, code: int) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text
