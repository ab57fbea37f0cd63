"""A recorded trace of requests, in the JSON lines of Mooncake's published traces.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 2353]}

timestamp: ms since the trace began; hash_ids: one for each 512 tokens of the prompt, begun ones included. Equal ids
are equal tokens, so that prefixes are shared as they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from distserve.bench.errors import BadOption

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Entry:
    """`blocks`: hash_ids; empty if the trace has none, and then nothing is shared."""

    at_s: float
    num_input: int
    num_output: int
    blocks: tuple[int, ...] = ()


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(option: str, path: Path) -> list[Entry]:
    """In order of time. Raises BadOption, which names the line."""
    try:
        text = path.read_bytes()
    except OSError as e:
        raise BadOption(option, path, f"can't be read: {e.strerror or e}") from None
    entries = list(_entries(option, path, text.splitlines()))
    if not entries:
        raise BadOption(option, path, "holds no requests")
    return sorted(entries, key=lambda e: e.at_s)


def _entries(option: str, path: Path, lines: Iterable[bytes]) -> Iterable[Entry]:
    decoder = msgspec.json.Decoder(_Line)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = decoder.decode(line)
            yield _entry(found)
        except ValueError as e:  # msgspec's are ValueErrors too
            raise BadOption(option, path, f"line {number}: {e}") from None


def _entry(line: _Line) -> Entry:
    if line.input_length < 1 or line.output_length < 1 or line.timestamp < 0:
        raise ValueError("input_length and output_length are at least 1, timestamp at least 0")
    most = -(-line.input_length // BLOCK_TOKENS)
    if len(line.hash_ids) > most:
        raise ValueError(f"{len(line.hash_ids)} hash_ids of {BLOCK_TOKENS} tokens for {line.input_length} tokens")
    return Entry(line.timestamp / 1000, line.input_length, line.output_length, tuple(line.hash_ids))
