"""What each token id adds to a text, for the two families of tokenizers whose decoding works token by token.

Byte-level BPE writes every byte as one printable character (GPT-2's table); a token is a run of bytes. SentencePiece
with byte fallback writes text with `▁` for a space, and `<0xNN>` for a byte of a character that it lacks. Other
decoders look at neighbours and have no such table.
"""

import json
from typing import Literal

from tokenizers import Tokenizer

Family = Literal["byte_level", "byte_fallback", "other"]


def _printable_bytes() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE, inverted: Radford et al. 2019 (GPT-2)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in set(kept)]
    return {chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(moved)}


_BYTE_OF = _printable_bytes()


class Pieces(dict[int, str | bytes]):
    """id -> str (whole text) or bytes (may be part of a character). Filled as ids come, 0.1 us once there.

    `family` tells how to join them; for "other" every look-up is of the lone token's text and joining is only an
    approximation. `num_stripped` leading spaces are taken off a text's start.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._replacements: list[tuple[str, str]] = []
        self.num_stripped = 0
        self.family: Family = self._recognise(json.loads(tokenizer.to_str()).get("decoder"))

    def _recognise(self, decoder: dict[str, object] | None) -> Family:
        if decoder is None:
            return "other"
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        assert isinstance(steps, list)
        kinds = [step["type"] for step in steps]
        if kinds and kinds[0] == "ByteLevel" and all(kind == "Fuse" for kind in kinds[1:]):
            return "byte_level"
        while kinds and kinds[0] == "Replace":
            pattern = steps[0]["pattern"].get("String")
            if pattern is None:
                return "other"
            self._replacements.append((pattern, steps[0]["content"]))
            steps, kinds = steps[1:], kinds[1:]
        if kinds[:2] != ["ByteFallback", "Fuse"] or kinds[2:] not in ([], ["Strip"]):
            return "other"
        if kinds[2:]:
            if steps[2]["content"] != " " or steps[2]["stop"]:
                return "other"
            self.num_stripped = steps[2]["start"]
        return "byte_fallback"

    def __missing__(self, token_id: int) -> str | bytes:
        token = self._tokenizer.id_to_token(token_id)
        piece: str | bytes
        if self.family == "byte_level":
            try:
                piece = bytes([_BYTE_OF[c] for c in token or ""])
            except KeyError:  # an added token, written as it is
                piece = (token or "").encode()
        elif token is None:
            piece = ""
        elif self.family == "byte_fallback":
            piece = self._fallback(token)
        else:
            piece = self._tokenizer.decode([token_id], skip_special_tokens=False)
        self[token_id] = piece
        return piece

    def _fallback(self, token: str) -> str | bytes:
        for old, new in self._replacements:
            token = token.replace(old, new)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                pass
        return token
