"""Which modules a guest loads, in which order."""

import pytest
from roce_lab.errors import LabError
from roce_lab.kernel import _load_order

DEP = """kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko: kernel/net/ipv4/udp_tunnel.ko.xz kernel/drivers/ib_core.ko
kernel/net/ipv4/udp_tunnel.ko.xz:
kernel/drivers/ib_core.ko: kernel/net/udp_core.ko
kernel/net/udp_core.ko:
kernel/net/9p/9pnet_virtio.ko: kernel/net/9p/9pnet.ko
kernel/net/9p/9pnet.ko:
kernel/fs/unwanted.ko:
"""


def test_a_module_comes_after_all_that_it_needs() -> None:
    names = [path.rpartition("/")[2].partition(".")[0] for path in _load_order(DEP, "kernel/fs/overlay.ko\n")]
    assert sorted(names) == ["9pnet", "9pnet_virtio", "ib_core", "rdma_rxe", "udp_core", "udp_tunnel"]
    for module, needs in (("rdma_rxe", "udp_tunnel"), ("rdma_rxe", "ib_core"), ("ib_core", "udp_core")):
        assert names.index(needs) < names.index(module)
    assert names.index("9pnet") < names.index("9pnet_virtio")


def test_a_kernel_that_cannot_do_it_is_refused_by_the_modules_name() -> None:
    with pytest.raises(LabError, match="no module overlay"):
        _load_order(DEP, "")
