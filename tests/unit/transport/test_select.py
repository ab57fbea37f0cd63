import subprocess
import sys
from itertools import permutations

import pytest

from distserve.errors import ConfigError, TransportUnavailable
from distserve.messages import Endpoint
from distserve.transport import factory
from distserve.transport.factory import make_receiver, make_sender, usable_kinds
from distserve.transport.options import StreamOptions
from distserve.transport.select import choose, host_key
from tests.contracts.transport.pools import SMALL, pool

HERE, ELSEWHERE = "boot-1", "boot-2"
SHM = Endpoint(kind="shm", host=HERE, address="@kv")
RDMA = Endpoint(kind="rdma", host=HERE, address="decode-1-a0")
LIMIT = 64 << 20
TCP = Endpoint(kind="tcp", host="10.0.0.1", address="10.0.0.1:7")


ALL = ["shm", "rdma", "tcp"]


@pytest.mark.parametrize("offered", list(permutations([SHM, RDMA, TCP])))
@pytest.mark.parametrize(
    ("kinds", "host", "num_bytes", "expected"),
    [
        (ALL, HERE, 0, SHM),
        (ALL, HERE, LIMIT, SHM),  # not above it
        (ALL, HERE, LIMIT + 1, RDMA),
        (ALL, ELSEWHERE, 1, RDMA),
        (ALL, ELSEWHERE, LIMIT + 1, RDMA),
        (["tcp", "rdma", "shm"], HERE, 1, SHM),  # the order of the asker's list says nothing
        (["tcp", "rdma"], HERE, 1, RDMA),
        (["tcp", "shm"], HERE, LIMIT + 1, SHM),
        (["shm", "tcp"], ELSEWHERE, 1, TCP),
        (["tcp"], HERE, LIMIT + 1, TCP),
        (["tcp"], ELSEWHERE, 1, TCP),
    ],
)
def test_which_transport(
    offered: tuple[Endpoint, ...], kinds: list[str], host: str, num_bytes: int, expected: Endpoint
) -> None:
    choice = choose(offered, kinds, host, num_bytes=num_bytes, zero_copy_threshold_bytes=LIMIT)
    assert choice.endpoint is expected
    assert ("same host" in choice.reason) == (host == HERE)


def test_a_threshold_of_zero_keeps_every_lease_on_one_host_in_shared_memory() -> None:
    assert choose([TCP, RDMA, SHM], ALL, HERE, num_bytes=1 << 50, zero_copy_threshold_bytes=0).endpoint is SHM


@pytest.mark.parametrize(
    ("offered", "forced", "host", "num_bytes", "kind", "reason"),
    [
        ([SHM, TCP], "auto", HERE, 1, "shm", "same host; preferred to tcp"),
        ([SHM, RDMA, TCP], "auto", HERE, LIMIT + 1, "rdma", "leases above transport.zero_copy_threshold_bytes"),
        ([SHM, RDMA, TCP], "auto", ELSEWHERE, 1, "rdma", "not known to be on one host; preferred to tcp"),
        ([TCP], "auto", HERE, 1, "tcp", "the only kind that both can use"),
        ([TCP, RDMA], "rdma", HERE, 1, "rdma", "transport.kind is rdma"),
        ([TCP], "rdma", ELSEWHERE, 1, "tcp", "transport.kind is rdma, which the two do not share"),
    ],
)
def test_a_choice_says_why(
    offered: list[Endpoint], forced: str, host: str, num_bytes: int, kind: str, reason: str
) -> None:
    options = {"num_bytes": num_bytes, "zero_copy_threshold_bytes": LIMIT, "may_fall_back": True}
    choice = choose(offered, ALL, host, forced, **options)
    assert choice.endpoint.kind == kind
    assert reason in choice.reason
    other = choose(offered, ALL, host, forced, **options | {"num_bytes": num_bytes + 1})
    assert other == choice  # no size in the words: it is logged once


def test_a_forced_kind_is_the_only_one() -> None:
    assert choose([SHM, TCP], ["shm", "tcp"], HERE, "tcp").endpoint is TCP
    with pytest.raises(TransportUnavailable, match="allows only shm") as caught:
        choose([SHM, TCP], ["shm", "tcp"], ELSEWHERE, "shm")
    assert caught.value.fields["forced"] == "shm"
    assert choose([SHM, TCP], ["shm", "tcp"], ELSEWHERE, "shm", may_fall_back=True).endpoint is TCP


@pytest.mark.parametrize(("offered", "kinds"), [([SHM], ["tcp"]), ([TCP], ["shm"]), ([], ["tcp"]), ([TCP], [])])
@pytest.mark.parametrize("may_fall_back", [False, True])
def test_no_common_transport_names_both_lists(offered: list[Endpoint], kinds: list[str], may_fall_back: bool) -> None:
    with pytest.raises(TransportUnavailable) as caught:
        choose(offered, kinds, HERE, may_fall_back=may_fall_back)
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
            with pytest.raises(TransportUnavailable, match="'rmda', must be one of cuda_ipc, shm, rdma, tcp"):
                make()


def test_a_pool_without_a_descriptor_cannot_be_sent_by_shm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(factory, "rdma_unusable", lambda options: "this test wants none")  # whatever this host has
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
