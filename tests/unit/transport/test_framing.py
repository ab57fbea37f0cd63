import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.errors import ChecksumMismatch, StaleEpoch, TransportError
from distserve.transport import framing
from distserve.transport.framing import HEADER, MAGIC, VERSION, Ack, FrameReader, FrameType, LeaseRef

LIMIT = 1 << 20
u64, u32 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)


def head_of(frame: bytes, kind: FrameType) -> bytes:
    assert framing.parse_header(frame[: HEADER.size], LIMIT) == (kind, len(frame) - HEADER.size)
    return frame[HEADER.size :]


@given(u64, u64, st.integers(0, 99), st.integers(0, 99), st.lists(st.tuples(u32, u32, u32), max_size=20))
def test_a_write_comes_out_as_it_went_in(lease_id, epoch, start, stop, runs):
    frame = framing.write_frame(lease_id, epoch, start, stop, runs)
    head = framing.parse_write(head_of(frame, FrameType.WRITE))
    assert (head.lease_id, head.epoch, head.layer_start, head.layer_stop) == (lease_id, epoch, start, stop)
    assert head.runs == runs
    assert head.num_layer_blocks == max(0, stop - start) * sum(run[2] for run in runs)


@given(u64, u64, st.lists(u64, max_size=20), st.binary(max_size=200))
def test_a_commit_comes_out_as_it_went_in(lease_id, epoch, sums, state):
    frame = framing.commit_frame(lease_id, epoch, np.array(sums, np.uint64), state)
    head = framing.parse_commit(head_of(frame, FrameType.COMMIT))
    assert (head.lease_id, head.epoch, head.sums.tolist(), head.state) == (lease_id, epoch, sums, state)


@pytest.mark.parametrize("parse", [framing.parse_write, framing.parse_commit])
@given(data=st.binary(max_size=120))
def test_garbage_heads_are_refused_as_transport_errors(parse, data):
    try:
        parse(data)
    except TransportError:
        pass  # the only exception there may be


def test_errors_cross_with_their_class_and_fields():
    ack = Ack(3, 9, "commit", error=framing.wire_error(ChecksumMismatch("bad", lease_id=3, block_index=7)))
    again = framing.parse_body(FrameType.ACK, head_of(framing.frame(FrameType.ACK, ack), FrameType.ACK), Ack)
    assert again.error is not None
    error = framing.error_of(again.error)
    assert isinstance(error, ChecksumMismatch)
    assert error.fields == {"lease_id": 3, "block_index": 7}
    assert not isinstance(error, StaleEpoch)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (HEADER.pack(0x1234, 1, VERSION, 0), "magic 0x1234, expected 0x6b76"),
        (HEADER.pack(MAGIC, 1, VERSION + 1, 0), f"version {VERSION + 1} .* this side {VERSION}"),
        (HEADER.pack(MAGIC, 99, VERSION, 0), "unknown frame type 99"),
        (HEADER.pack(MAGIC, 1, VERSION, LIMIT + 1), f"HELLO frame of {LIMIT + 1} bytes, the limit is {LIMIT}"),
    ],
)
def test_bad_headers_say_what_is_wrong(header, said):
    with pytest.raises(TransportError, match=said):
        framing.parse_header(header, LIMIT)


def test_a_body_of_another_type_is_refused():
    body = framing.frame(FrameType.OPEN, LeaseRef(1, 2))[HEADER.size :]
    with pytest.raises(TransportError, match="OPEN frame where one of Ack"):
        framing.parse_body(FrameType.OPEN, body, Ack)
    with pytest.raises(TransportError, match="malformed ACK"):
        framing.parse_body(FrameType.ACK, b"\xc1", Ack)


@given(st.lists(st.binary(max_size=30), max_size=8), st.integers(1, 40))
def test_the_reader_finds_frames_however_they_are_cut(reasons, step):
    frames = [framing.frame(FrameType.OPEN, LeaseRef(i, 1, r.hex())) for i, r in enumerate(reasons)]
    stream, reader, found = b"".join(frames), FrameReader(LIMIT), []
    for i in range(0, len(stream), step):
        found += reader.feed(stream[i : i + step])
    assert [framing.parse_body(kind, head, LeaseRef).reason for kind, head in found] == [r.hex() for r in reasons]
