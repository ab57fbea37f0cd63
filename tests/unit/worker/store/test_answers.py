"""Answers of several sources, put together. Sources are letters, tiers digits."""

from hypothesis import given
from hypothesis import strategies as st

from distserve.kv.hashing import HASH_BYTES
from distserve.worker.store.answers import Answer, Asked, Segment, put_together, settled
from distserve.worker.store.found import Found, Pin, Source


def asked(start: int, size: int, waiting: int = 0, **answers: str) -> Asked:
    """answers: of each source the tiers of what it has."""
    segment = Segment(start, b"".join(bytes([start + i]) * HASH_BYTES for i in range(size)))
    said = [Answer(bytes(map(int, t)), Pin(Source("kvstore", name), 1)) for name, t in answers.items()]
    return Asked(segment, waiting, said)


def spelled(segments: list[Asked]) -> list[tuple[str, int, str]]:
    return [(p.pin.source.worker_id, p.start, "".join(map(str, p.tiers))) for p in put_together(segments)]


def test_the_longest_answer_is_taken_and_of_equal_ones_the_faster():
    assert spelled([asked(0, 4, a="1", b="22", c="")]) == [("b", 0, "22")]
    assert spelled([asked(0, 4, a="22", b="12", c="13")]) == [("b", 0, "12")]


def test_equal_answers_share_the_work():
    taken = {spelled([asked(0, 2, a="11", b="11")])[0][0] for _ in range(100)}
    assert taken == {"a", "b"}


def test_what_comes_after_a_gap_does_not_count():
    assert spelled([asked(0, 2, a="11"), asked(2, 2, b="1"), asked(4, 2, a="11")]) == [("a", 0, "11"), ("b", 2, "1")]
    assert spelled([asked(0, 2), asked(2, 2, a="11")]) == []


def test_what_is_settled_need_not_be_waited_for():
    assert settled([asked(0, 2, 1, a="11")])  # all of it in memory
    assert not settled([asked(0, 2, 1, a="12")])  # somebody may have it in a faster tier
    assert not settled([asked(0, 2, 1, a="1")])
    assert settled([asked(0, 2, 0, a="1"), asked(2, 2, 1)])  # it ends in the first
    assert not settled([asked(0, 2, 0, a="11"), asked(2, 2, 1)])
    assert settled([asked(0, 2, 0, a="33")])
    assert settled([])


answers = st.dictionaries(st.sampled_from("abcd"), st.text("0123", max_size=3), max_size=4)


@given(st.lists(answers, max_size=5))
def test_what_is_put_together_is_unbroken_and_as_long_as_can_be(said: list[dict[str, str]]):
    segments = [asked(3 * i, 3, **one) for i, one in enumerate(said)]
    pieces = put_together(segments)
    longest = 0
    for one in said:
        num = max(map(len, one.values()), default=0)
        longest += num
        if num < 3:
            break
    found = Found(0, pieces)
    assert len(found) == longest == sum(found.tiers.values())
    at = 0
    for piece in pieces:
        assert piece.start == at
        assert piece.hashes == b"".join(bytes([at + i]) * HASH_BYTES for i in range(len(piece)))
        at += len(piece)


@given(st.integers(0, 12))
def test_the_beginning_of_what_was_found_is_what_it_says(num: int):
    found = Found(0, put_together([asked(0, 3, a="111"), asked(3, 3, b="222"), asked(6, 3, a="33")]), ())
    part = found.beginning(num)
    assert len(part) == min(num, len(found))
    assert b"".join(p.hashes for p in part.pieces) == b"".join(p.hashes for p in found.pieces)[: num * HASH_BYTES]
