"""The model's tokenizer: text to ids and back. One object for the process; it is never changed after loading."""

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from distserve.errors import ConfigError
from distserve_gateway.detokenizing import (
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    Detokenizer,
    WindowDetokenizer,
)
from distserve_gateway.pieces import Pieces

OFF_LOOP_CHARACTERS = 4096  # above this, encoding (some ms) runs in a thread: the event loop serves streams meanwhile
NUM_CONTEXT_TOKENS = 8


class ModelTokenizer:
    """`vocab_size` bounds the ids that a request may name: the model's, or the tokenizer's if not given."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int = 0) -> None:
        tokenizer.no_truncation()  # a tokenizer.json may ask for both; a prompt is never cut silently
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._pieces = Pieces(tokenizer)
        self._special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self.vocab_size = vocab_size or tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelTokenizer":
        """Load a model folder's tokenizer.json. Raises ConfigError."""
        path = folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as e:  # tokenizers raises plain Exception
            raise ConfigError(
                f"model.path is {str(folder)!r}, must hold a tokenizer.json that can be read: {e}",
                key="model.path",
                value=str(folder),
                expected="a model folder with tokenizer.json",
            ) from e
        return cls(tokenizer, _model_vocab_size(folder))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of the text; special tokens written in it are recognised."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    async def encode_off_loop(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """The ids of each, in a thread if they are long together (tokenizers releases the GIL)."""

        def encode_all() -> list[list[int]]:
            return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

        if sum(map(len, texts)) <= OFF_LOOP_CHARACTERS:
            return encode_all()
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode_all)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str:
        """The token as its vocabulary writes it; empty for an id without one."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for."""
        piece = self._pieces[token_id]
        return piece if isinstance(piece, bytes) else piece.encode()

    def detokenizer(self, *, skip_special_tokens: bool, context_ids: Sequence[int] = ()) -> Detokenizer:
        """For text that goes on from `context_ids` (the prompt); after none it is the start of a text."""
        skipped = self._special if skip_special_tokens else frozenset[int]()
        context = context_ids[-NUM_CONTEXT_TOKENS:]
        if self._pieces.family == "byte_level":
            return ByteLevelDetokenizer(self._pieces, skipped)
        if self._pieces.family == "byte_fallback":
            goes_on = any(i not in skipped and self._pieces[i] for i in context)
            return ByteFallbackDetokenizer(self._pieces, skipped, 0 if goes_on else self._pieces.num_stripped)
        return WindowDetokenizer(self._tokenizer, skipped, context)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def read_json(path: Path) -> dict[str, Any]:
    """A model folder's JSON file; empty if there is none. Raises ConfigError if it is not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} is not readable JSON: {e}", key="model.path", value=str(path)) from e
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, must hold an object", key="model.path")
    return value


def _text_config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    nested = config.get("text_config")
    return config | nested if isinstance(nested, dict) else config


def _model_vocab_size(folder: Path) -> int:
    return int(_text_config(folder).get("vocab_size") or 0)


def model_context_length(folder: Path) -> int:
    """max_position_embeddings of the model's config.json, or 0 if it does not say."""
    return int(_text_config(folder).get("max_position_embeddings") or 0)
