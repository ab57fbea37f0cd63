"""Tokens to text, as they come. A piece never holds half a character: its bytes wait for the rest.

The pieces of an answer together are what decoding all its ids at once gives. One case differs: in a run of
byte-fallback tokens that is not UTF-8 as a whole, its complete characters come as themselves (they were sent before
the bad byte was known), where decoding the whole run gives a replacement character for each of its bytes.
"""

import codecs
from collections.abc import Container, Sequence
from typing import Protocol

from tokenizers import Tokenizer

from distserve_gateway.pieces import Pieces

REPLACEMENT = "\ufffd"
MAX_PENDING_TOKENS = 8  # no character is longer; past it the window says what it has


class Detokenizer(Protocol):
    def feed(self, token_id: int) -> str:
        """The text that this token completes; often one word, sometimes nothing."""

    def flush(self) -> str:
        """What is left at the end: replacement characters for an incomplete one."""


class ByteLevelDetokenizer:
    """Byte-level BPE: a token is bytes, and UTF-8 is decoded incrementally."""

    __slots__ = ("_decode", "_pieces", "_skipped")

    def __init__(self, pieces: Pieces, skipped: Container[int]) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decode(self._pieces[token_id])  # type: ignore[arg-type]  # byte-level pieces are bytes

    def flush(self) -> str:
        return self._decode(b"", True)


class ByteFallbackDetokenizer:
    """SentencePiece with byte fallback: text pieces, and single bytes that gather until they are a character.

    `strip` leading spaces are taken off: the artificial one that the normaliser puts before a text's first word.
    """

    __slots__ = ("_pending", "_pieces", "_skipped", "_strip")

    def __init__(self, pieces: Pieces, skipped: Container[int], strip: int) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._strip = strip
        self._pending = b""

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._pieces[token_id]
        if isinstance(piece, bytes):
            text = self._add_byte(piece)
        elif self._pending:
            text = self._give_up() + piece
        else:
            text = piece
        return self._stripped(text) if self._strip else text

    def _add_byte(self, byte: bytes) -> str:
        self._pending += byte
        try:
            text = self._pending.decode()
        except UnicodeDecodeError as e:
            if e.reason == "unexpected end of data":
                return ""
            if len(self._pending) == 1:  # can't start a character
                return self._give_up()
            self._pending = self._pending[:-1]
            return self._give_up() + self._add_byte(byte)
        self._pending = b""
        return text

    def _give_up(self) -> str:
        text = REPLACEMENT * len(self._pending)
        self._pending = b""
        return text

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if not text.startswith(" "):
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text

    def flush(self) -> str:
        text = self._give_up()
        return self._stripped(text) if self._strip else text


class WindowDetokenizer:
    """Any decoder: decodes a short window of ids again and gives what grew.

    ids  |<- given already: context ->|<- pending ->|
    """

    __slots__ = ("_ids", "_num_given", "_shown", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skipped: Container[int], context_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._ids = [i for i in context_ids if i not in skipped]
        self._num_given = len(self._ids)
        self._shown = self._text()

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False) if self._ids else ""

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._text()
        if text.endswith(REPLACEMENT) and len(self._ids) - self._num_given < MAX_PENDING_TOKENS:
            return ""
        return self._give(text)

    def _give(self, text: str) -> str:
        piece = text[len(self._shown) :]
        if piece:
            self._ids = self._ids[self._num_given :]
            self._num_given = len(self._ids)
            self._shown = self._text()
        return piece

    def flush(self) -> str:
        return self._give(self._text()) if len(self._ids) > self._num_given else ""
