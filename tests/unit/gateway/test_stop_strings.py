"""Stop strings against a slow, obvious search."""

from hypothesis import given, settings
from hypothesis import strategies as st

from distserve_gateway.stop_strings import StopScanner, StopStrings

strings = st.lists(st.text("ab🙂", min_size=1, max_size=4), min_size=1, max_size=4)
pieces = st.lists(st.text("abc🙂", max_size=4), max_size=12)


def scan(stops: list[str], texts: list[str]) -> tuple[list[str], bool]:
    scanner = StopScanner(StopStrings(stops))
    out = []
    for text in texts:
        given, matched = scanner.feed(text)
        out.append(given)
        if matched:
            return out, True
    return [*out, scanner.flush()], False


def reference(stops: list[str], text: str) -> tuple[str, bool]:
    """The match that ends first, the longest of those."""
    ends = [(text.index(s) + len(s), -len(s)) for s in stops if s in text]
    if not ends:
        return text, False
    end, length = min(ends)
    return text[: end + length], True


@settings(max_examples=600)
@given(stops=strings, texts=pieces)
def test_text_is_cut_before_the_first_match_however_it_was_cut_into_pieces(stops: list[str], texts: list[str]) -> None:
    out, matched = scan(stops, texts)
    assert ("".join(out), matched) == reference(stops, "".join(texts))


@settings(max_examples=600)
@given(stops=strings, texts=pieces)
def test_what_is_out_never_holds_the_beginning_of_a_stop_string_that_may_come(
    stops: list[str], texts: list[str]
) -> None:
    scanner = StopScanner(StopStrings(stops))
    out = seen = ""
    for text in texts:
        given, matched = scanner.feed(text)
        out, seen = out + given, seen + text
        if matched:
            break
        beginning = max(n for s in stops for n in range(len(s)) if seen.endswith(s[:n]))
        assert len(seen) - len(out) >= beginning


@given(stops=strings, texts=pieces)
def test_no_more_is_held_than_could_become_a_stop_string(stops: list[str], texts: list[str]) -> None:
    scanner = StopScanner(StopStrings(stops))
    out = seen = ""
    for text in texts:
        given, matched = scanner.feed(text)
        if matched:
            return
        out, seen = out + given, seen + text
        held = seen[len(out) :]
        assert seen.startswith(out)
        assert not held or any(s.startswith(held) and s != held for s in stops)


def test_a_match_before_min_tokens_is_plain_text() -> None:
    scanner = StopScanner(StopStrings(["END"]))
    assert scanner.feed("an END", armed=False) == ("an END", False)
    assert scanner.feed(" and EN") == (" and ", False)
    assert scanner.feed("D of it") == ("", True)


def test_a_match_may_begin_before_min_tokens_and_end_after() -> None:
    scanner = StopScanner(StopStrings(["END"]))
    assert scanner.feed("an EN", armed=False) == ("an ", False)
    assert scanner.feed("D") == ("", True)


def test_one_string_inside_another() -> None:
    assert scan(["abcd", "bc"], ["xab", "cd"]) == (["x", "a"], True)
    assert scan(["b", "ab"], ["xab"]) == (["x"], True)


def test_characters_that_mean_something_to_a_regular_expression() -> None:
    for stop in ("]", "^", "-", "\\", "[a-z]", ".*", "]^-\\"):
        assert scan([stop], ["text ", *stop, " more"])[0][0] == "text "
        assert scan([stop], [f"text {stop} more"]) == (["text "], True)
