"""Pieces of text, token by token, against decoding all ids at once."""

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from distserve_gateway.pieces import Pieces
from distserve_gateway.tokenizing import ModelTokenizer
from tests.unit.gateway import vocabularies

TEXTS = [
    "The capital of France is Paris.",
    "Größe, naïve, 你好世界, こんにちは",
    "🙂🎉👩‍👩‍👧 family",
    "  leading and  double spaces\n\tand tabs",
    "Ω≈ç√∫˜µ≤≥÷ £ñ¿",
]
BYTEWISE = [vocabularies.byte_level, vocabularies.unigram_fallback, vocabularies.bpe_fallback]
ALL = [*BYTEWISE, vocabularies.metaspace, vocabularies.word_piece]


@cache
def model_tokenizer(make: Callable[[], Tokenizer]) -> ModelTokenizer:
    return ModelTokenizer(make())


def streamed(tokenizer: ModelTokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    return [detokenizer.feed(i) for i in ids] + [detokenizer.flush()]


def ids_of(tokenizer: Tokenizer, draw: st.DataObject, *, most: int = 30) -> list[int]:
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return draw.draw(st.lists(st.integers(0, size - 1), max_size=most))


def test_families_are_recognised() -> None:
    assert [Pieces(make()).family for make in ALL] == ["byte_level", "byte_fallback", "byte_fallback", "other", "other"]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_out_whole_and_without_half_characters(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = model_tokenizer(make)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    if make in BYTEWISE:
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=400, deadline=None)
@given(draw=st.data(), skip=st.booleans())
def test_byte_level_pieces_join_to_the_whole_for_any_ids(draw: st.DataObject, skip: bool) -> None:
    tokenizer = model_tokenizer(vocabularies.byte_level)
    ids = ids_of(vocabularies.byte_level(), draw)
    assert "".join(streamed(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=24))
def test_byte_level_joins_to_the_whole_for_any_bytes(data: bytes) -> None:
    tokenizer = model_tokenizer(vocabularies.byte_level)
    alphabet = {bytes(tokenizer.token_bytes(i)): i for i in range(3, 300)}
    ids = [alphabet[bytes([b])] for b in data]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def by_character(data: bytes) -> str:
    """Every character that is whole, and a replacement for each other byte."""
    text = ""
    while data:
        n = next((n for n in range(1, 5) if n <= len(data) and _is_utf8(data[:n])), 0)
        text, data = text + (data[:n].decode() if n else "\ufffd"), data[n or 1 :]
    return text


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("make", [vocabularies.unigram_fallback, vocabularies.bpe_fallback])
@settings(max_examples=300, deadline=None)
@given(draw=st.data(), skip=st.booleans())
def test_byte_fallback_pieces_join_to_the_whole_unless_a_run_of_bytes_is_bad(
    make: Callable[[], Tokenizer], draw: st.DataObject, skip: bool
) -> None:
    tokenizer = model_tokenizer(make)
    word = st.integers(0, tokenizer.vocab_size - 1).filter(lambda i: not 3 <= i < 259).map(lambda i: [i])
    character = st.characters(exclude_categories=["Cs"]).map(lambda c: [3 + b for b in c.encode()])
    bad = st.sampled_from([[3 + 0xE4], [3 + 0xF0, 3 + 0x9F], [3 + 0xFF], [3 + 0x80]])
    parts = draw.draw(st.lists(st.one_of(word, character, character, bad), max_size=8))
    ids = [i for part in parts for i in part]
    joined = "".join(streamed(tokenizer, ids, skip=skip))
    expected, run, good = "", b"", True
    for i in [*(i for i in ids if i >= 3 or not skip), None]:
        if i is not None and 3 <= i < 259:
            run += tokenizer.token_bytes(i)
            continue
        good = good and _is_utf8(run)
        expected, run = expected + by_character(run), b""
        expected += "" if i is None else tokenizer.token(i).replace("▁", " ")
    assert joined == (expected.removeprefix(" ") if make is vocabularies.unigram_fallback else expected)
    if good:
        assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("make", [vocabularies.metaspace, vocabularies.word_piece])
@settings(max_examples=200, deadline=None)
@given(draw=st.data())
def test_other_decoders_join_to_the_whole(make: Callable[[], Tokenizer], draw: st.DataObject) -> None:
    tokenizer = model_tokenizer(make)
    ids = ids_of(make(), draw)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("make", BYTEWISE)
def test_no_piece_has_a_replacement_character_before_the_end_of_an_incomplete_character(
    make: Callable[[], Tokenizer],
) -> None:
    tokenizer = model_tokenizer(make)
    ids = tokenizer.encode("hello 🙂", add_special_tokens=False)[:-1]
    pieces = streamed(tokenizer, ids)
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    assert "\ufffd" in pieces[-1]


def test_a_completion_of_a_prompt_keeps_the_space_that_starts_its_first_word() -> None:
    tokenizer = model_tokenizer(vocabularies.unigram_fallback)
    prompt = tokenizer.encode("The capital", add_special_tokens=True)
    ids = tokenizer.encode("of France", add_special_tokens=False)
    after = tokenizer.detokenizer(skip_special_tokens=True, context_ids=prompt)
    assert "".join(after.feed(i) for i in ids) == " of France"
    alone = tokenizer.detokenizer(skip_special_tokens=True, context_ids=[1])
    assert "".join(alone.feed(i) for i in ids) == "of France"


def test_special_tokens_are_skipped_or_written() -> None:
    tokenizer = model_tokenizer(vocabularies.byte_level)
    ids = [*tokenizer.encode("hi", add_special_tokens=False), vocabularies.EOS_ID]
    assert "".join(streamed(tokenizer, ids, skip=True)) == "hi"
    assert "".join(streamed(tokenizer, ids, skip=False)) == "hi<|im_end|>"


def test_a_token_knows_its_bytes() -> None:
    tokenizer = model_tokenizer(vocabularies.byte_level)
    ids = tokenizer.encode("世", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == "世".encode()
    fallback = model_tokenizer(vocabularies.bpe_fallback)
    assert fallback.token_bytes(3 + 0xE4) == b"\xe4"


def test_a_tokenizer_file_that_asks_to_truncate_or_pad_is_not_obeyed() -> None:
    asking = Tokenizer.from_str(vocabularies.byte_level().to_str())
    asking.enable_truncation(4)
    asking.enable_padding(length=64)
    tokenizer = ModelTokenizer(asking)
    assert len(tokenizer.encode("a b c d e f g h i j k l m n o p", add_special_tokens=False)) > 8
    assert len(tokenizer.encode("a", add_special_tokens=False)) == 1
