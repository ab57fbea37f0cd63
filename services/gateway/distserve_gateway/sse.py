"""Server-sent events, read: bytes as they come, to the data of whole events (WHATWG HTML, 9.2.6).

Only what a stream of JSON needs: fields other than `data` and comments are passed over, and lines end at LF or CRLF
(a text within JSON may hold every other character that some libraries break lines at).
"""

MAX_EVENT_BYTES = 8 * 1024 * 1024


class Events:
    """One stream's."""

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._line = b""  # its beginning
        self._data: list[bytes] = []
        self._size = 0  # of _data

    def feed(self, received: bytes) -> list[bytes]:
        """The data of the events that these bytes complete. Raises ValueError for one over max_bytes."""
        *lines, self._line = (self._line + received).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._size += len(line)
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data, self._size = [], 0
        if (size := self._size + len(self._line)) > self._max_bytes:
            raise ValueError(f"an event of {size} bytes or more, at most {self._max_bytes} may be")
        return events
