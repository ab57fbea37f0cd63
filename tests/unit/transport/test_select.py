import subprocess
import sys

import pytest

from distserve.errors import ConfigError, TransportUnavailable
from distserve.messages import Endpoint
from distserve.transport.factory import make_receiver, make_sender, usable_kinds
from distserve.transport.options import StreamOptions
from distserve.transport.select import choose, host_key
from tests.contracts.transport.pools import SMALL, pool

HERE, ELSEWHERE = "boot-1", "boot-2"
SHM = Endpoint(kind="shm", host=HERE, address="@kv")
TCP = Endpoint(kind="tcp", host="10.0.0.1", address="10.0.0.1:7")


def test_one_host_takes_shared_memory_and_others_tcp():
    for kinds in (["shm", "tcp"], ["tcp", "shm"]):
        assert choose([TCP, SHM], kinds, HERE) is SHM
        assert choose([TCP, SHM], kinds, ELSEWHERE) is TCP
    assert choose([TCP, SHM], ["tcp"], HERE) is TCP


def test_a_forced_kind_is_the_only_one():
    assert choose([SHM, TCP], ["shm", "tcp"], HERE, "tcp") is TCP
    with pytest.raises(TransportUnavailable, match="allows only shm") as caught:
        choose([SHM, TCP], ["shm", "tcp"], ELSEWHERE, "shm")
    assert caught.value.fields["forced"] == "shm"


@pytest.mark.parametrize(("offered", "kinds"), [([SHM], ["tcp"]), ([TCP], ["shm"]), ([], ["tcp"]), ([TCP], [])])
def test_no_common_transport_names_both_lists(offered: list[Endpoint], kinds: list[str]):
    with pytest.raises(TransportUnavailable) as caught:
        choose(offered, kinds, HERE)
    for name in [e.address for e in offered] + kinds:
        assert name in str(caught.value)


def test_the_host_key_is_the_same_in_every_process_here():
    code = "from distserve.transport.select import host_key; print(host_key())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert other.stdout.strip() == host_key()
    assert len(host_key()) > 36


def test_unknown_kinds_are_refused_with_those_that_would_do():
    with pool(2) as memory:
        for make in (lambda: make_sender("rmda", memory, sender_id="p"), lambda: make_receiver("rmda", memory)):
            with pytest.raises(TransportUnavailable, match="'rmda', must be one of shm, tcp"):
                make()


def test_a_pool_without_a_descriptor_cannot_be_sent_by_shm():
    with pool(2) as memory:
        assert usable_kinds(memory) == ["shm", "tcp"]
        memory.fd = None
        assert usable_kinds(memory) == ["tcp"]
        with pytest.raises(TransportUnavailable, match="no file descriptor"):
            make_sender("shm", memory, sender_id="p")
    assert memory.layout is SMALL


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"peer_timeout_s": 0}, "peer_timeout_s is 0"),
        ({"frame_bytes": 10}, "frame_bytes is 10, must be at least 4096"),
        ({"dscp": {"decode": 64}}, "dscp of decode is 64, must be 0..63"),
    ],
)
def test_impossible_options_are_refused_by_name(wrong: dict, said: str):
    with pytest.raises(ConfigError, match=said):
        StreamOptions(**wrong)
