import ipaddress
import os
import socket
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.errors import ConfigError, MalformedMessage, TransportUnavailable
from distserve.messages import RailOffer
from distserve.transport.rdma import ports
from distserve.transport.rdma.addresses import prefix_lengths
from distserve.transport.rdma.rails import address_of, match_rails

FE80 = "fe80:0000:0000:0000:5054:00ff:fe00:0001"
FD00 = "fd00:0000:0000:0000:0000:0000:0000:0001"
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"


def mapped(ip: str) -> str:
    return ipaddress.IPv6Address(f"::ffff:{ip}").exploded


class Tree:
    """A sysfs as the kernel would show it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def device(
        self,
        name: str,
        gids: list[tuple[str, str]],  # (GID, type)
        *,
        netdev: str = "eth0",
        port: int = 1,
        state: str = "4: ACTIVE",
        link_layer: str = "Ethernet",
        mtu: int = 1500,
        numa: int | None = None,
    ) -> None:
        base = f"class/infiniband/{name}"
        self.write(f"{base}/ports/{port}/state", state)
        self.write(f"{base}/ports/{port}/link_layer", link_layer)
        for index, (gid, kind) in enumerate(gids):
            self.write(f"{base}/ports/{port}/gids/{index}", gid)
            if kind:
                self.write(f"{base}/ports/{port}/gid_attrs/types/{index}", kind)
                self.write(f"{base}/ports/{port}/gid_attrs/ndevs/{index}", netdev)
        self.write(f"class/net/{netdev}/mtu", str(mtu))
        if numa is not None:
            self.write(f"{base}/device/numa_node", str(numa))

    def ports(self, prefixes: dict[tuple[str, str], int] | None = None) -> list[ports.Port]:
        known = {(dev, ipaddress.ip_address(ip)): length for (dev, ip), length in (prefixes or {}).items()}
        return ports.discover(self.root, known)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def v2(*gids: str) -> list[tuple[str, str]]:
    return [(gid, "RoCE v2") for gid in gids]


def test_a_host_without_rdma_has_no_ports(tree: Tree) -> None:
    assert tree.ports() == []
    with pytest.raises(TransportUnavailable, match="no RDMA device"):
        ports.choose_ports([])


def test_ports_are_read_with_their_gids_addresses_and_prefixes(tree: Tree) -> None:
    table = [(FE80, "IB/RoCE v1"), (FE80, "RoCE v2"), (mapped("10.77.0.1"), "RoCE v2"), (ZERO, "RoCE v2"), (FD00, "")]
    tree.device("mlx5_0", table, netdev="ens1", mtu=9000, numa=1)
    (port,) = tree.ports({("ens1", "10.77.0.1"): 24, ("ens2", "10.77.0.1"): 8})
    assert (port.name, port.state, port.link_layer, port.netdev) == ("mlx5_0:1", "ACTIVE", "Ethernet", "ens1")
    assert (port.mtu_bytes, port.numa_node) == (4096, 1)
    assert [(gid.index, gid.is_v2, str(gid.address), gid.prefix_length) for gid in port.gids] == [
        (0, False, "fe80::5054:ff:fe00:1", 0),
        (1, True, "fe80::5054:ff:fe00:1", 0),
        (2, True, "10.77.0.1", 24),
    ]


def test_a_software_device_takes_its_interface_from_its_parent_and_its_node_from_the_interface(tree: Tree) -> None:
    tree.device("rxe0", [], netdev="eth7", mtu=4200)
    tree.write("class/infiniband/rxe0/parent", "eth7")
    tree.write("class/net/eth7/device/numa_node", "2")
    (port,) = tree.ports()
    assert (port.netdev, port.mtu_bytes, port.numa_node) == ("eth7", 4096, 2)


@pytest.mark.parametrize(
    ("netdev", "rdma"), [(9000, 4096), (4192, 4096), (4191, 2048), (1500, 1024), (1119, 512), (352, 256), (351, 0)]
)
def test_rdma_packets_and_their_headers_fit_the_interface(netdev: int, rdma: int) -> None:
    assert ports.rdma_mtu(netdev) == rdma


class TestChoosingPorts:
    @pytest.fixture
    def found(self, tree: Tree) -> list[ports.Port]:
        tree.device("mlx5_0", v2(mapped("10.0.0.1")), netdev="a", numa=0)
        tree.device("mlx5_1", v2(mapped("10.0.1.1")), netdev="b", numa=1)
        tree.device("mlx5_2", v2(mapped("10.0.2.1")), netdev="c", numa=1, state="1: DOWN")
        tree.device("mlx5_3", v2(FE80), netdev="d", numa=0, link_layer="InfiniBand")
        tree.device("mlx5_4", [(FE80, "IB/RoCE v1")], netdev="e", numa=0)
        tree.device("mlx5_5", v2(mapped("10.0.5.1")), netdev="f", state="1: DOWN")
        tree.device("mlx5_5", v2(mapped("10.0.5.2")), netdev="f", port=2)
        return tree.ports()

    def test_unconfigured_the_nearest_one_is_taken(self, found: list[ports.Port]) -> None:
        def chosen(near: int | None, distances: dict[int, int] | None = None, subnet: str = "") -> list[str]:
            return [p.name for p in ports.choose_ports(found, (), subnet, near, distances)]

        assert chosen(None) == ["mlx5_0:1"]
        assert chosen(0) == ["mlx5_0:1"]
        assert chosen(1) == ["mlx5_1:1"]
        assert chosen(7) == ["mlx5_5:2"]  # whose node is not known, so it may be near
        assert chosen(7, {0: 14, 1: 12, 7: 10}) == ["mlx5_1:1"]
        assert chosen(1, subnet="10.0.0.0/24") == ["mlx5_0:1"]

    def test_configured_ones_keep_their_order(self, found: list[ports.Port]) -> None:
        chosen = ports.choose_ports(found, ["mlx5_5", "mlx5_0:1"], near_numa=1)
        assert [port.name for port in chosen] == ["mlx5_5:2", "mlx5_0:1"]

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("mlx5_9", "does not exist; expected one of mlx5_0:1, mlx5_1:1"),
            ("mlx5_0:2", "does not exist"),
            ("mlx5_2", "is DOWN, not ACTIVE"),
            ("mlx5_5:1", "is DOWN"),
            ("mlx5_3", "InfiniBand, not Ethernet"),
            ("mlx5_4", "has no RoCE v2 GID"),
            ("mlx5_1", r"no RoCE v2 GID in 10\.0\.0\.0/24, only 10\.0\.1\.1"),
        ],
    )
    def test_an_unusable_configured_one_is_refused_by_name(self, found: list[ports.Port], name: str, why: str) -> None:
        with pytest.raises(ConfigError, match=why) as caught:
            ports.choose_ports(found, ["mlx5_0", name], subnet="10.0.0.0/24")
        assert (caught.value.key, caught.value.value) == ("transport.rdma.devices", name)

    def test_one_named_twice_is_refused(self, found: list[ports.Port]) -> None:
        with pytest.raises(ConfigError, match="a second time"):
            ports.choose_ports(found, ["mlx5_0", "mlx5_0:1"])

    def test_nothing_usable_says_why_for_each(self, found: list[ports.Port]) -> None:
        with pytest.raises(TransportUnavailable, match=r"mlx5_2:1 is DOWN.*mlx5_3:1 is of link layer InfiniBand"):
            ports.choose_ports(found, subnet="192.168.0.0/16")
        with pytest.raises(ConfigError, match=r"transport\.rdma\.subnet is '10\.0\.0'"):
            ports.choose_ports(found, subnet="10.0.0")


class TestChoosingAGid:
    def port(self, tree: Tree, gids: list[tuple[str, str]], prefixes: dict[tuple[str, str], int]) -> ports.Port:
        tree.device("mlx5_0", gids)
        return tree.ports(prefixes)[0]

    def test_ipv4_before_global_ipv6_before_link_local_and_never_version_1(self, tree: Tree) -> None:
        gids = [(mapped("10.0.0.1"), "IB/RoCE v1"), *v2(FE80, FD00, mapped("10.0.0.1"), mapped("10.0.9.1"))]
        port = self.port(tree, gids, {("eth0", "10.0.9.1"): 24, ("eth0", "fd00::1"): 64})
        assert ports.choose_gid(port).index == 3
        assert ports.choose_gid(port, "fe80::/10").gid == FE80
        assert ports.choose_gid(port, "fd00::/8").gid == FD00
        assert ports.choose_gid(port, "10.0.9.0/24").index == 4

    def test_one_that_shares_a_subnet_with_a_peer_is_preferred(self, tree: Tree) -> None:
        port = self.port(
            tree,
            v2(FE80, FD00, mapped("10.0.0.1"), mapped("10.0.9.1")),
            {("eth0", "10.0.9.1"): 24, ("eth0", "fd00::1"): 64, ("eth0", "10.0.0.1"): 24},
        )
        assert ports.choose_gid(port, peers=[mapped("10.0.9.7")]).index == 3
        assert ports.choose_gid(port, peers=["fd00::7"]).index == 1
        assert ports.choose_gid(port, peers=["fe80::7", "2001:db8::1"]).index == 2  # of no help: as without
        assert ports.choose_gid(port, "10.0.0.0/24", [mapped("10.0.9.7")]).index == 2  # the subnet is an order

    def test_errors_name_what_there_is(self, tree: Tree) -> None:
        port = self.port(tree, [(FE80, "IB/RoCE v1"), *v2(mapped("10.0.0.1"))], {})
        with pytest.raises(ConfigError, match=r"it has 10\.0\.0\.1 \(index 1\)"):
            ports.choose_gid(port, "10.1.0.0/16")
        v1_only = ports.Port("d", 1, "ACTIVE", "Ethernet", "", 0, -1, port.gids[:1])
        with pytest.raises(TransportUnavailable, match=f"of other types: {FE80}"):
            ports.choose_gid(v1_only)

    def test_an_offer_holds_the_usable_gids_best_first(self, tree: Tree) -> None:
        port = self.port(tree, v2(FE80, mapped("10.0.0.1"), mapped("10.0.9.1")), {("eth0", "10.0.0.1"): 24})
        every = ports.offer(3, port, 1024)
        assert (every.index, every.mtu, [gid[0] for gid in every.gids]) == (3, 1024, [1, 0, 2])
        assert ports.offer(0, port, 1024, "10.0.0.0/16").gids == (
            (1, mapped("10.0.0.1"), 24),
            (2, mapped("10.0.9.1"), 0),
        )


class TestMatchingRails:
    def test_ports_of_one_subnet_find_each_other_whatever_their_order(self) -> None:
        ours = [RailOffer(0, ((3, mapped("10.0.0.1"), 24),), 4096), RailOffer(1, ((3, mapped("10.0.1.1"), 24),), 1024)]
        theirs = [
            RailOffer(0, ((5, mapped("10.0.1.2"), 24),), 4096),
            RailOffer(1, ((7, mapped("10.0.0.2"), 24),), 2048),
        ]
        first, second = match_rails(ours, theirs)
        assert msgspec.structs.astuple(first) == (0, 3, 1, mapped("10.0.0.2"), 2048)
        assert msgspec.structs.astuple(second) == (1, 3, 0, mapped("10.0.1.2"), 1024)

    def test_without_a_subnet_in_common_equal_positions_are_paired(self) -> None:
        ours = [RailOffer(i, ((3, mapped(f"10.0.{i}.1"), 31),), 4096) for i in range(2)]
        theirs = [RailOffer(i, ((3, mapped(f"10.9.{i}.1"), 31),), 4096) for i in range(3)]
        assert [(rail.index, rail.their_index) for rail in match_rails(ours, theirs)] == [(0, 0), (1, 1)]

    def test_a_port_without_a_common_subnet_stays_out_when_another_has_one(self) -> None:
        ours = [RailOffer(0, ((3, mapped("10.0.0.1"), 24),), 4096), RailOffer(1, ((3, mapped("10.0.1.1"), 24),), 4096)]
        theirs = [
            RailOffer(0, ((3, mapped("10.0.7.2"), 24),), 4096),
            RailOffer(1, ((3, mapped("10.0.1.2"), 24),), 4096),
        ]
        assert [(rail.index, rail.their_index) for rail in match_rails(ours, theirs)] == [(1, 1)]

    def test_addresses_of_different_families_never_talk(self) -> None:
        v4 = RailOffer(0, ((1, mapped("10.0.0.1"), 24),), 4096)
        both = RailOffer(0, ((0, FE80, 64), (1, FD00, 64)), 4096)
        assert match_rails([v4], [both]) == []
        v6 = RailOffer(0, ((4, "fe80::9", 64), (5, "fd00:0001::2", 64)), 4096)
        assert [(rail.gid_index, rail.their_gid) for rail in match_rails([both], [v6])] == [(1, "fd00:0001::2")]

    def test_unequal_prefix_lengths_make_one_subnet_only_if_both_agree(self) -> None:
        ours = [RailOffer(0, ((0, mapped("10.0.1.1"), 16), (1, mapped("10.1.0.1"), 24)), 4096)]
        theirs = [RailOffer(0, ((0, mapped("10.0.2.1"), 24), (1, mapped("10.1.0.2"), 24)), 4096)]
        assert match_rails(ours, theirs)[0].gid_index == 1

    def test_a_gid_that_is_none_is_refused(self) -> None:
        good = [RailOffer(0, ((0, FD00, 64),), 4096)]
        with pytest.raises(MalformedMessage, match="gid is 'ten', must be eight groups"):
            match_rails(good, [RailOffer(0, ((0, "ten", 0),), 4096)])


few = st.integers(0, 3)
gids = st.one_of(
    st.builds(lambda a, b: mapped(f"10.0.{a}.{b}"), few, few),
    st.builds(lambda a, b: ipaddress.IPv6Address(f"fd00:{a}::{b}").exploded, few, few),
    st.builds(lambda b: ipaddress.IPv6Address(f"fe80::{b}").exploded, few),
)
offers = st.lists(
    st.tuples(
        st.lists(st.tuples(few, gids, st.sampled_from([0, 16, 24, 64])), max_size=4, unique_by=lambda gid: gid[0]),
        st.sampled_from(ports.MTUS),
    ),
    max_size=4,
).map(lambda made: [RailOffer(i, tuple(table), mtu) for i, (table, mtu) in enumerate(made)])


@given(ours=offers, theirs=offers)
def test_both_ends_come_to_the_same_rails(ours: list[RailOffer], theirs: list[RailOffer]) -> None:
    here, there = match_rails(ours, theirs), match_rails(theirs, ours)

    def gid(offer: RailOffer, index: int) -> str:
        return next(text for i, text, _ in offer.gids if i == index)

    seen_here = {
        (rail.index, rail.their_index, gid(ours[rail.index], rail.gid_index), rail.their_gid, rail.mtu) for rail in here
    }
    seen_there = {
        (rail.their_index, rail.index, rail.their_gid, gid(theirs[rail.index], rail.gid_index), rail.mtu)
        for rail in there
    }
    assert seen_here == seen_there
    assert len({rail.index for rail in here}) == len({rail.their_index for rail in here}) == len(here)
    kinds = [{(address_of(g).version, address_of(g).is_link_local) for _, g, _ in o.gids} for o in (*ours, *theirs)]
    if any(a & b for a in kinds[: len(ours)] for b in kinds[len(ours) :]):
        assert here  # whoever can talk does


@given(ours=offers)
def test_a_host_talks_to_itself_through_each_port_by_itself(ours: list[RailOffer]) -> None:
    rails = match_rails(ours, ours)
    assert [(rail.index, rail.their_index) for rail in rails] == [(o.index, o.index) for o in ours if o.gids]


def test_a_traffic_class_that_the_host_forces_is_seen(tree: Tree) -> None:
    tree.device("mlx5_0", v2(mapped("10.0.0.1")))
    (port,) = tree.ports()

    def forced(text: str) -> int | None:
        tree.write("class/infiniband/mlx5_0/tc/1/traffic_class", text)
        return ports.traffic_class_override(port, tree.root)

    assert ports.traffic_class_override(port, tree.root) is None
    assert forced("") is None
    assert forced("Global tclass=106") == 106
    assert forced("Global tclass=0\nsrc_ip=10.0.0.1,tclass=96") == 0
    assert forced("src_ip=10.0.0.1,tclass=96") is None  # for some of the peers only
    assert forced("136") == 136


def test_the_node_of_a_set_of_cpus_and_the_distances_from_it(tree: Tree) -> None:
    tree.write("devices/system/node/node0/cpulist", "0-3,8")
    tree.write("devices/system/node/node1/cpulist", "4-7,9")
    tree.write("devices/system/node/node1/distance", "21 10")
    assert ports.numa_of({0, 8}, tree.root) == 0
    assert ports.numa_of({5, 9}, tree.root) == 1
    assert ports.numa_of({3, 4}, tree.root) is None
    assert ports.numa_of(set(), tree.root) is None
    assert ports.numa_distances(1, tree.root) == {0: 21, 1: 10}
    assert ports.numa_distances(0, tree.root) == {}


def test_the_node_of_a_gpu(tree: Tree) -> None:
    tree.write("bus/pci/devices/0000:1b:00.0/numa_node", "1")
    tree.write("bus/pci/devices/0000:3b:00.0/numa_node", "-1")
    assert ports.numa_of_pci("0000:1B:00.0", tree.root) == 1
    assert ports.numa_of_pci("0000:3b:00.0", tree.root) is None
    assert ports.numa_of_pci("0000:5b:00.0", tree.root) is None


def test_the_kernel_tells_the_prefix_length_of_the_loopback_address() -> None:
    if not any(name == "lo" for _, name in socket.if_nameindex()) or not os.path.exists("/sys/class/net/lo"):
        pytest.skip("no loopback interface")
    assert prefix_lengths()["lo", ipaddress.IPv4Address("127.0.0.1")] == 8
