"""Finds stop strings in text that comes piece by piece, and never lets out a part of one.

An Aho-Corasick automaton (Aho and Corasick 1975) over the characters: its state is the longest suffix of the text
that begins a stop string, so what must be held back is at hand, and a piece costs its own length, however many
strings there are. The match that ends first wins, the longest if several end there; so where the text was cut into
pieces makes no difference.
"""

import re
from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton of one request's strings; shared by its outputs, each with its own StopScanner."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.edges: list[dict[str, int]] = [{}]
        self.fail = [0]
        self.match = [0]  # length of the longest stop string that ends in this state
        depth = [0]
        for string in strings:
            state = 0
            for char in string:
                following = self.edges[state].get(char)
                if following is None:
                    following = len(self.edges)
                    self.edges[state][char] = following
                    self.edges.append({})
                    self.fail.append(0)
                    self.match.append(0)
                    depth.append(depth[state] + 1)
                state = following
            self.match[state] = len(string)
        # Characters to hold: the longest suffix that could still grow into a stop string.
        self.hold = [d if edges else 0 for d, edges in zip(depth, self.edges, strict=True)]
        queue = deque(self.edges[0].values())
        while queue:
            state = queue.popleft()
            fail = self.fail[state]
            self.match[state] = self.match[state] or self.match[fail]
            self.hold[state] = self.hold[state] or self.hold[fail]
            for char, following in self.edges[state].items():
                self.fail[following] = self.step(fail, char)
                queue.append(following)
        self.first = re.compile("[" + re.escape("".join(self.edges[0])) + "]")

    def step(self, state: int, char: str) -> int:
        while True:
            following = self.edges[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fail[state]


class StopScanner:
    """One output's text on its way through the automaton."""

    __slots__ = ("_held", "_state", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """(text to let out, whether a stop string is complete). The stop string itself never comes out.

        Not `armed` (min_tokens not reached): a match that ends in this piece does not count and is plain text.
        """
        stops = self._stops
        state = self._state
        start = 0
        if state == 0:
            first = stops.first.search(text)
            if first is None:
                return text, False
            start = first.start()
        for i in range(start, len(text)):
            state = stops.step(state, text[i])
            if armed and stops.match[state]:
                cut = len(self._held) + i + 1 - stops.match[state]
                out = (self._held + text[: i + 1])[:cut]
                self._held, self._state = "", 0
                return out, True
        self._state = state
        text = self._held + text
        hold = stops.hold[state]
        if not hold:
            self._held = ""
            return text, False
        self._held = text[-hold:]
        return text[:-hold], False

    def flush(self) -> str:
        """What was held back, when the answer has ended and nothing more can complete it."""
        text, self._held, self._state = self._held, "", 0
        return text
