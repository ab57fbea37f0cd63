"""The codec: everything round-trips, nothing is coerced, other versions and garbage are refused by name."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect as mi

from distserve.errors import BusError, MalformedMessage, Overloaded, VersionMismatch
from distserve.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    AnyMessage,
    ErrorReply,
    Message,
    SamplingParams,
    SequenceKey,
    SubmitReply,
    SubmitRequest,
    WorkerInfo,
    decode,
    decode_as,
    encode,
)

KINDS: tuple[type[Message], ...] = get_args(AnyMessage)
HEADER = bytes([PROTOCOL_MAJOR, PROTOCOL_MINOR])
WIRE_INTEGERS = (-(2**63), 2**64 - 1)  # what msgpack holds


def values(kind: mi.Type) -> st.SearchStrategy[Any]:
    """Values of a msgspec type, its constraints kept; what a new field of a message needs is added here."""
    match kind:
        case mi.StructType():
            fields = {f.encode_name: values(f.type) for f in kind.fields}
            return st.builds(kind.cls, **fields)
        case mi.UnionType():
            return st.one_of(*(values(t) for t in kind.types))
        case mi.IntType():
            least = kind.ge if kind.ge is not None else WIRE_INTEGERS[0]
            most = kind.le if kind.le is not None else WIRE_INTEGERS[1]
            return st.integers(least, most)
        case mi.FloatType():
            low = kind.ge if kind.ge is not None else kind.gt
            high = kind.le if kind.le is not None else kind.lt
            return st.floats(
                low, high, exclude_min=kind.gt is not None, exclude_max=kind.lt is not None, allow_nan=False
            )
        case mi.StrType():
            return st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
        case mi.BytesType():
            return st.binary(max_size=20)
        case mi.BoolType():
            return st.booleans()
        case mi.NoneType():
            return st.none()
        case mi.LiteralType():
            return st.sampled_from(kind.values)
        case mi.ListType():
            return st.lists(values(kind.item_type), max_size=3)
        case mi.VarTupleType():
            return st.lists(values(kind.item_type), max_size=3).map(tuple)
        case mi.TupleType():
            return st.tuples(*(values(t) for t in kind.item_types))
        case mi.DictType():
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=3)
    raise NotImplementedError(f"no strategy for {kind}")


def messages() -> st.SearchStrategy[Message]:
    return st.one_of(*(values(mi.type_info(kind)) for kind in KINDS))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_message_round_trips(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(values(mi.type_info(kind)))
    raw = encode(message)
    assert raw[:2] == HEADER
    assert decode(raw) == message
    assert decode_as(kind, memoryview(raw)) == message


def test_every_message_class_is_one_that_can_be_decoded() -> None:
    assert set(Message.__subclasses__()) == set(KINDS)
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert len(set(tags)) == len(KINDS)


@given(st.binary(max_size=64))
def test_garbage_is_refused_with_a_bus_error_and_nothing_else(raw: bytes) -> None:
    try:
        message = decode(raw)
    except BusError:
        return
    assert encode(message)[:1] == raw[:1]


@given(messages(), st.data())
def test_a_cut_or_damaged_message_is_refused_or_still_a_message(message: Message, data: st.DataObject) -> None:
    raw = bytearray(encode(message))
    with pytest.raises(MalformedMessage):
        decode(bytes(raw[: data.draw(st.integers(0, len(raw) - 1))]))
    position = data.draw(st.integers(2, len(raw) - 1))
    raw[position] = data.draw(st.integers(0, 255))
    try:
        assert isinstance(decode(bytes(raw)), Message)
    except MalformedMessage:
        pass


@given(st.integers(0, 255).filter(lambda major: major != PROTOCOL_MAJOR), st.integers(0, 255), st.binary(max_size=8))
def test_another_major_is_refused_with_both_versions_named_whatever_its_body(
    major: int, minor: int, body: bytes
) -> None:
    with pytest.raises(VersionMismatch) as caught:
        decode(bytes([major, minor]) + body)
    theirs, ours = f"{major}.{minor}", f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
    assert caught.value.fields == {"theirs": theirs, "ours": ours}
    assert f"protocol {theirs}" in str(caught.value)
    assert ours in str(caught.value)


def test_a_newer_minor_with_fields_that_are_unknown_here_is_understood() -> None:
    body = msgspec.msgpack.encode({"type": "SubmitReply", "num_waiting": 3, "mood": "fine"})
    assert decode(bytes([PROTOCOL_MAJOR, 255]) + body) == SubmitReply(num_waiting=3)


REQUEST: dict[str, Any] = {
    "type": "SubmitRequest",
    "key": ["r1", 0, 0],
    "model": "m",
    "gateway": "g",
    "token_ids": [1, 2],
    "num_prompt_tokens": 2,
    "sampling": {"max_tokens": 4},
}


def test_the_reference_request_is_well_formed() -> None:
    assert decode(HEADER + msgspec.msgpack.encode(REQUEST)) == SubmitRequest(
        key=SequenceKey("r1"),
        model="m",
        gateway="g",
        token_ids=[1, 2],
        num_prompt_tokens=2,
        sampling=SamplingParams(max_tokens=4),
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_prompt_tokens": "2"}, "num_prompt_tokens"),  # text is no number
        ({"num_prompt_tokens": 2.5}, "num_prompt_tokens"),
        ({"num_prompt_tokens": True}, "num_prompt_tokens"),  # nor is a boolean
        ({"num_prompt_tokens": 0}, "num_prompt_tokens"),
        ({"token_ids": [1, "2"]}, "token_ids"),
        ({"token_ids": None}, "token_ids"),
        ({"sampling": {"max_tokens": 4, "temperature": "1"}}, "temperature"),
        ({"sampling": {"max_tokens": 4, "temperature": -1.0}}, "temperature"),
        ({"sampling": {"max_tokens": 4, "top_p": 1.5}}, "top_p"),
        ({"sampling": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling": {}}, "max_tokens"),
        ({"traffic_class": "express"}, "traffic_class"),
        ({"slo": {"tpot_s": 0}}, "tpot_s"),
        ({"slo": {"tpot_s": -0.05}}, "tpot_s"),
        ({"slo": {"tpot_s": float("nan")}}, "tpot_s"),
        ({"slo": {"tpot_s": float("inf")}}, "tpot_s"),
        ({"slo": {"ttft_s": float("nan")}}, "ttft_s"),
        ({"slo": {"ttft_s": float("-inf")}}, "ttft_s"),
        ({"model": None}, "model"),
        ({"type": "NoSuchMessage"}, "NoSuchMessage"),
    ],
)
def test_a_wrong_value_is_refused_by_name_and_never_coerced(change: dict[str, Any], named: str) -> None:
    with pytest.raises(MalformedMessage, match=named):
        decode(HEADER + msgspec.msgpack.encode(REQUEST | change))


@pytest.mark.parametrize("field", ["type", "key", "model", "token_ids", "sampling"])
def test_a_missing_field_is_refused_by_name(field: str) -> None:
    with pytest.raises(MalformedMessage, match=field):
        decode(HEADER + msgspec.msgpack.encode({k: v for k, v in REQUEST.items() if k != field}))


def test_bytes_after_the_message_are_refused() -> None:
    with pytest.raises(MalformedMessage):
        decode(encode(SubmitReply()) + b"\x00")


def test_the_kind_is_checked() -> None:
    with pytest.raises(MalformedMessage, match="expected SubmitReply, got WorkerInfo"):
        decode_as(SubmitReply, encode(WorkerInfo(worker_id="p1", role="prefill")))


def test_an_error_reply_is_raised_as_what_it_stands_for_unless_it_is_what_is_asked_for() -> None:
    raw = encode(ErrorReply.of(Overloaded("full", retry_after_s=1.5)))
    with pytest.raises(Overloaded, match="full") as caught:
        decode_as(SubmitReply, raw)
    assert caught.value.retry_after_s == 1.5
    assert decode_as(ErrorReply, raw).code == "overloaded"
