"""HTTP/1.1 as a client of streams needs it: the bytes of a request, and an answer read as its pieces come."""

from __future__ import annotations

from collections.abc import Mapping

Piece = tuple[float, bytes]  # when it came, s; what came then

MAX_HEAD_BYTES = 64 * 1024
_NO_BODY = (204, 304)


class BadAnswer(Exception):
    """An answer that is none, or no complete stream of tokens."""


def request(method: str, target: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """The bytes of one request."""
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    if method != "GET":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class Reading:
    """One answer. `feed` what came until it says that the answer is whole; `body` is then its pieces without framing,
    each with the time at which it came."""

    __slots__ = ("_chunked", "_head", "_in_trailer", "_left", "_line", "body", "headers", "status", "whole")

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self.body: list[Piece] = []
        self.whole = False
        self._head: bytes | None = b""
        self._chunked = False
        self._in_trailer = False
        self._left: int | None = None  # bytes of the body, or of the chunk, to come; None: until the end
        self._line = b""  # the beginning of a line of the chunks' framing

    @property
    def begun(self) -> bool:
        return self._head != b""

    @property
    def keeps_open(self) -> bool:
        """The connection may be used again once the answer is whole."""
        return self.whole and self.headers.get("connection", "").lower() != "close" and self._is_bounded

    @property
    def is_chunked(self) -> bool:
        return self._chunked

    @property
    def _is_bounded(self) -> bool:
        return self._chunked or self._left is not None

    def content(self) -> bytes:
        return b"".join(data for _, data in self.body)

    def feed(self, at_s: float, data: bytes) -> bool:
        """True once the answer is whole. Raises BadAnswer for what is not HTTP."""
        if self._head is not None:
            data = self._feed_head(data)
            if self._head is not None:
                return False
        if self._chunked:
            self._feed_chunks(at_s, data)
        elif data or self._left == 0:
            self._feed_plain(at_s, data)
        return self.whole

    def end(self) -> None:
        """The connection was closed. Raises BadAnswer if the answer is not whole."""
        if self.whole or (self._head is None and not self._is_bounded):
            self.whole = True
            return
        if self._head is not None:
            raise BadAnswer(f"not HTTP: {self._head[:200]!r}" if self._head else "closed without an answer (no HTTP)")
        where = "inside a chunk" if self._chunked else f"{self._left} bytes before the body's end"
        raise BadAnswer(f"the connection ended {where}: {self.content()[-200:]!r}")

    def _feed_head(self, data: bytes) -> bytes:
        """What of `data` is behind the head."""
        assert self._head is not None
        self._head += data
        while (end := self._head.find(b"\r\n\r\n")) >= 0:
            rest = self._head[end + 4 :]
            self._take_head(self._head[:end])
            if self.status >= 200:
                self._head = None
                return rest
            self._head = rest  # 100 Continue: the real one follows
        if len(self._head) > MAX_HEAD_BYTES:
            raise BadAnswer(f"a head of more than {MAX_HEAD_BYTES} bytes")
        return b""

    def _take_head(self, head: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        status = lines[0].split(" ", 2)[1:2]
        if not lines[0].startswith("HTTP/1.") or not status or not status[0].isdigit():
            raise BadAnswer(f"not HTTP: {lines[0][:200]!r}")
        pairs = (line.partition(":") for line in lines[1:])
        self.status = int(status[0])
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length", "")
        if self._chunked or self.status in _NO_BODY:
            self._left = 0
        elif length.isdigit():
            self._left = int(length)

    def _feed_plain(self, at_s: float, data: bytes) -> None:
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
            self.whole = self._left == 0
        if data:
            self.body.append((at_s, data))

    def _feed_chunks(self, at_s: float, data: bytes) -> None:
        offset = 0
        while offset < len(data):
            if self._left:
                part = data[offset : offset + self._left]
                self.body.append((at_s, part))
                self._left -= len(part)
                offset += len(part)
                continue
            end = data.find(b"\n", offset)
            if end < 0:
                self._line += data[offset:]
                return
            line = (self._line + data[offset:end]).strip()
            self._line, offset = b"", end + 1
            self._take_line(line)

    def _take_line(self, line: bytes) -> None:
        """A chunk's size, the end of one's line, or a line behind the last."""
        if self._in_trailer:
            self.whole = self.whole or not line
        elif line:
            try:
                self._left = int(line.split(b";")[0], 16)
            except ValueError:
                raise BadAnswer(f"no size of a chunk: {line[:80]!r}") from None
            self._in_trailer = self._left == 0
