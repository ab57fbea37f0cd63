"""What a sender says of its GPU memory. The driver itself is run in tests/gpu/test_cuda_ipc.py."""

import msgspec
import pytest

from distserve.errors import TransportError, TransportUnavailable
from distserve.transport.ipc_memory import HANDLE_BYTES, IpcDriver, IpcMemory, decoded
from distserve.transport.rdma import dmabuf

MEMORY = IpcMemory(b"p" * 16, 0x7F00_0000_0000, b"h" * HANDLE_BYTES, 4096, 1 << 20, "0000:1b:00.0")


def test_it_comes_back_as_it_went() -> None:
    assert decoded(MEMORY.encoded()) == MEMORY


@pytest.mark.parametrize("raw", [b"", b"\x01", b"x" * 100, MEMORY.encoded()[:-3]])
def test_what_is_no_description_is_refused(raw: bytes) -> None:
    with pytest.raises(TransportError, match="says nothing that its GPU memory could be found by"):
        decoded(raw)


def test_a_handle_of_another_length_is_refused() -> None:
    with pytest.raises(TransportError, match="has 5 bytes, must have 64"):
        decoded(msgspec.structs.replace(MEMORY, handle=b"short").encoded())


def test_without_a_driver_the_kind_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dmabuf, "_LIBRARY", "libcuda.so.0.not-there")
    with pytest.raises(TransportUnavailable, match="no CUDA driver"):
        IpcDriver()
