from __future__ import annotations

import errno
import itertools
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.errors import ConfigError, TransportUnavailable
from distserve.kv.layout import block_bytes, layer_block_bytes
from distserve.messages import KVLayout
from distserve.transport.cuda_pool import CudaPool
from distserve.transport.rdma.dmabuf import (
    CudaDriver,
    Export,
    Facts,
    expandable_segments,
    export,
    plan,
    whole_pages,
)
from distserve.transport.rdma.memory import DmabufMemory, HostMemory
from distserve.transport.rdma.verbs import Nic

LAYOUT = KVLayout(weights="test", dtype="float32", num_layers=3, num_kv_heads=1, head_dim=2, block_size=4, rope="{}")


@given(st.integers(1, 2**47), st.integers(1, 2**38), st.sampled_from([4096, 16384, 65536]))
def test_whole_pages_hold_the_range_and_no_page_more(address: int, length: int, page_bytes: int):
    pages = whole_pages(address, length, page_bytes)
    assert pages.start % page_bytes == 0
    assert pages.length % page_bytes == 0
    assert pages.start + pages.offset == address
    assert 0 <= pages.offset < page_bytes
    assert pages.start + pages.length - page_bytes < address + length <= pages.start + pages.length


@pytest.mark.parametrize(("address", "length", "key"), [(0, 10, "address"), (4096, 0, "length"), (4096, -1, "length")])
def test_no_range_is_refused_by_name(address: int, length: int, key: str):
    with pytest.raises(ConfigError) as caught:
        whole_pages(address, length, 4096)
    assert caught.value.fields["key"] == key


def test_the_plan_is_dmabuf_only_where_nothing_stands_against_it():
    for flags in itertools.product((False, True), repeat=4):
        exported, registered, ordered, expandable = flags
        made = plan(Facts("cuda", *flags))
        assert made.path == ("dmabuf" if exported and registered and ordered and not expandable else "staged")
        assert plan(Facts("cpu", *flags)).path == "host"


def test_the_plan_says_what_stands_against_dmabuf():
    assert "GPU's driver" in plan(Facts("cuda", False, True, True)).reason
    assert "network card's driver registers no" in plan(Facts("cuda", True, False, True)).reason
    assert "kernels may run ahead" in plan(Facts("cuda", True, True, False)).reason
    assert "PYTORCH_CUDA_ALLOC_CONF" in plan(Facts("cuda", True, True, True, True)).reason
    with pytest.raises(ConfigError, match="'mps'"):
        plan(Facts("mps"))


@pytest.mark.parametrize(
    ("conf", "asked"),
    [
        ("", False),
        ("expandable_segments:True", True),
        ("max_split_size_mb:64, expandable_segments : true", True),
        ("expandable_segments:False,max_split_size_mb:64", False),
        ("garbage_collection_threshold:0.8", False),
    ],
)
def test_expandable_segments_are_read_from_torchs_setting(conf: str, asked: bool):
    assert expandable_segments(conf) is asked


class FileDriver:
    """Exports a file where CUDA would export memory, and keeps to its rules."""

    def __init__(self, *, supported: bool = True) -> None:
        self.asked: tuple[int, int, int] | None = None
        self._supported = supported

    def device_of(self, address: int) -> int:
        return 3

    def supported(self, device: int) -> bool:
        return self._supported

    def export_pages(self, device: int, start: int, length: int) -> int:
        assert start % 4096 == 0
        assert length % 4096 == 0
        self.asked = (device, start, length)
        return os.memfd_create("dmabuf")


def test_an_export_is_asked_in_whole_pages_and_says_where_the_range_starts():
    driver = FileDriver()
    exported = export(0x7000_0000_0100, 10_000, driver, page_bytes=4096)
    assert driver.asked == (3, 0x7000_0000_0000, 12_288)
    assert (exported.offset, exported.length) == (0x100, 10_000)
    os.fstat(exported.fd)
    fd = exported.fd
    exported.close()
    exported.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_device_without_dmabuf_is_refused_before_it_is_tried():
    driver = FileDriver(supported=False)
    with pytest.raises(TransportUnavailable, match="GPU 3"):
        export(4096, 4096, driver)
    assert driver.asked is None


def test_a_machine_without_a_cuda_driver_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("distserve.transport.rdma.dmabuf._LIBRARY", "libcuda-that-is-not-there.so.1")
    with pytest.raises(TransportUnavailable, match="no CUDA driver"):
        CudaDriver()


class RecordingNic:
    name = "nic0:1"

    def __init__(self) -> None:
        self.registered: list[tuple[object, ...]] = []

    def register(self, address: int, length: int, *, remote_write: bool) -> object:
        self.registered.append((address, length, remote_write))
        return object()

    def register_dmabuf(self, fd: int, offset: int, length: int, *, remote_write: bool) -> object:
        self.registered.append((fd, offset, length, remote_write))
        return object()


def test_host_memory_is_addressed_as_the_process_does():
    blocks = np.zeros((5, LAYOUT.num_layers, layer_block_bytes(LAYOUT)), np.uint8)
    memory, nic = HostMemory(blocks), RecordingNic()
    assert memory.address == blocks.ctypes.data
    memory.register(nic, remote_write=True)
    assert nic.registered == [(blocks.ctypes.data, blocks.nbytes, True)]


def test_an_exported_pool_is_addressed_from_its_offset_and_takes_no_windows():
    size = 5 * block_bytes(LAYOUT)
    memory, nic = DmabufMemory(Export(7, 0x40, size), size), RecordingNic()
    assert (memory.address, memory.length, memory.takes_windows) == (0x40, size, False)
    memory.register(nic, remote_write=False)
    assert nic.registered == [(7, 0x40, size, False)]


def test_an_export_of_less_than_the_pool_is_refused():
    size = 5 * block_bytes(LAYOUT)
    with pytest.raises(TransportUnavailable, match=f"{size - 1} bytes, the pool has {size}"):
        DmabufMemory(Export(-1, 0, size - 1), size)


class RecordingApi:
    """pyverbs, as far as a dma-buf's registration goes."""

    Error = RuntimeError

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def DmaBufMR(self, pd: object, length: int, access: int, dmabuf: object = None, offset: int = 0) -> object:
        self.calls.append((pd, length, access, dmabuf, offset))
        return SimpleNamespace(lkey=3, rkey=4)


def bare_nic(api: object) -> Nic:
    nic = Nic.__new__(Nic)
    nic.api, nic.name, nic.pd, nic.fd, nic.regions = api, "nic0:1", "pd", 9, set()
    nic.has_windows = True
    nic.codes = SimpleNamespace(local_write=1, remote_write=2, mw_bind=16)
    return nic


@pytest.mark.parametrize(("remote_write", "access"), [(False, 1), (True, 3)])
def test_a_dmabuf_is_registered_by_its_descriptor_and_never_for_windows(remote_write: bool, access: int):
    api = RecordingApi()
    nic = bare_nic(api)
    region = nic.register_dmabuf(5, 0x240, 8192, remote_write=remote_write)
    assert api.calls == [("pd", 8192, access, 5, 0x240)]
    assert (region.lkey, region.rkey) == (3, 4)
    assert nic.regions == {region}


@pytest.mark.parametrize(("fd", "offset", "length"), [(-1, 0, 8), (5, -1, 8), (5, 0, 0)])
def test_what_is_no_dmabuf_never_reaches_pyverbs(fd: int, offset: int, length: int):
    api = RecordingApi()
    with pytest.raises(OSError, match="are no dma-buf") as caught:
        bare_nic(api).register_dmabuf(fd, offset, length, remote_write=False)
    assert caught.value.errno == errno.EINVAL
    assert not api.calls


def test_a_pyverbs_without_dmabufs_says_so():
    with pytest.raises(OSError, match="registers no dma-buf") as caught:
        bare_nic(SimpleNamespace(DmaBufMR=None)).register_dmabuf(5, 0, 8, remote_write=False)
    assert caught.value.errno == errno.EOPNOTSUPP


def test_a_pool_on_a_machine_without_a_driver_is_staged():
    tensor = SimpleNamespace(device=Device("cuda", 1), shape=(4,), data_ptr=lambda: 0x1000)
    pool = CudaPool(tensor, LAYOUT)
    assert (pool.name, pool.num_blocks) == ("cuda:1", 4)
    try:
        CudaDriver()
    except TransportUnavailable:
        assert plan(replace(pool.facts(), dmabuf_registered=True)).path == "staged"
    with pytest.raises(ConfigError, match="the pool is on cpu:0"):
        CudaPool(SimpleNamespace(device=Device("cpu", 0), shape=(4,)), LAYOUT)


class Device:
    def __init__(self, kind: str, index: int) -> None:
        self.type, self._index = kind, index

    def __str__(self) -> str:
        return f"{self.type}:{self._index}"
