"""pyverbs as verbs.py uses it: found, imported without side effects, and with the differences of its versions evened
out. Known to work with 44 (Debian 12) and written for 59 too, whose enums are classes of another module."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import EnumMeta
from pathlib import Path
from typing import Any

from distserve.transport.rdma.device import Verb

# Where Debian and Ubuntu put python3-pyverbs, which a virtual environment does not see.
SYSTEM_PACKAGES = "/usr/lib/python3/dist-packages"
_ROOMS = ("addr", "base", "cq", "device", "fork", "mr", "pd", "pyverbs_error", "qp", "wr")

_lock = threading.Lock()
_loaded: Api | None = None


class Api:
    """The classes and functions of pyverbs by name, in one place, and its constants as plain ints."""

    def __init__(self, rooms: dict[str, Any], enums: Any) -> None:
        self.Context: Any = rooms["device"].Context
        self.get_device_list: Any = rooms["device"].get_device_list
        self.PD: Any = rooms["pd"].PD
        self.MR: Any = rooms["mr"].MR
        self.DmaBufMR: Any = getattr(rooms["mr"], "DmaBufMR", None)  # not in the oldest
        self.MW: Any = rooms["mr"].MW
        self.MWBindInfo: Any = rooms["mr"].MWBindInfo
        self.CQ: Any = rooms["cq"].CQ
        self.CompChannel: Any = rooms["cq"].CompChannel
        self.QP: Any = rooms["qp"].QP
        self.QPAttr: Any = rooms["qp"].QPAttr
        self.QPCap: Any = rooms["qp"].QPCap
        self.QPInitAttr: Any = rooms["qp"].QPInitAttr
        self.AHAttr: Any = rooms["addr"].AHAttr
        self.GID: Any = rooms["addr"].GID
        self.GlobalRoute: Any = rooms["addr"].GlobalRoute
        self.SGE: Any = rooms["wr"].SGE
        self.SendWR: Any = rooms["wr"].SendWR
        self.RecvWR: Any = rooms["wr"].RecvWR
        self.Error: type[Exception] = rooms["pyverbs_error"].PyverbsError
        self._enums = enums

    def constant(self, name: str) -> int:
        """IBV_..., from the flat module of old versions or from any of the enum classes of new ones."""
        if hasattr(self._enums, name):
            return int(getattr(self._enums, name))
        for kind in vars(self._enums).values():
            if isinstance(kind, EnumMeta) and name in kind.__members__:
                return int(kind[name])
        raise ImportError(f"this pyverbs has no {name}")

    def channel(self, context: Any) -> tuple[Any, int]:
        """A completion channel and its descriptor, which 44 keeps to itself: the one that is new. Its kind of
        descriptor is opened by this process nowhere else but here and when a device is opened (both under one lock)."""
        with _lock:
            before = _event_descriptors()
            channel = self.CompChannel(context)
            if hasattr(channel, "fd"):
                return channel, int(channel.fd)
            (fd,) = _event_descriptors() - before
            return channel, fd

    def context(self, device: str) -> Any:
        """An opened device."""
        with _lock:
            return self.Context(name=device)


class Codes:
    """pyverbs' numbers, looked up once."""

    def __init__(self, api: Api) -> None:
        of = api.constant
        self.local_write = of("IBV_ACCESS_LOCAL_WRITE")
        self.remote_write = of("IBV_ACCESS_REMOTE_WRITE")
        self.mw_bind = of("IBV_ACCESS_MW_BIND")
        self.type_2 = of("IBV_MW_TYPE_2")
        self.cap_windows_2b = of("IBV_DEVICE_MEM_WINDOW_TYPE_2B")
        self.signaled = of("IBV_SEND_SIGNALED")
        self.write = of("IBV_WR_RDMA_WRITE")
        self.write_immediate = of("IBV_WR_RDMA_WRITE_WITH_IMM")
        self.send = of("IBV_WR_SEND")
        self.bind = of("IBV_WR_BIND_MW")
        self.invalidate = of("IBV_WR_LOCAL_INV")
        self.reliable = of("IBV_QPT_RC")
        self.error_state = of("IBV_QPS_ERR")
        self.qp_state = of("IBV_QP_STATE")
        self.qp_caps = of("IBV_QP_CAP")
        self.path = of("IBV_QP_AV")
        self.verbs = {
            of("IBV_WC_SEND"): Verb.SEND,
            of("IBV_WC_RDMA_WRITE"): Verb.WRITE,
            of("IBV_WC_BIND_MW"): Verb.BIND,
            of("IBV_WC_LOCAL_INV"): Verb.INVALIDATE,
            of("IBV_WC_RECV"): Verb.RECEIVE,
            of("IBV_WC_RECV_RDMA_WITH_IMM"): Verb.RECEIVE_IMMEDIATE,
        }


class Closed:
    """Stands where a closed object of pyverbs stood, which would crash the process if it was used."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        raise OSError(errno.EBADF, f"{self._what} is closed")


@contextmanager
def tried(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise os_error(what, error) from None


def os_error(what: str, error: Exception) -> Exception:
    """pyverbs' errors as OSError with errno and what was tried; others as they are."""
    if not isinstance(error, load().Error):
        return error
    code = getattr(error, "error_code", -1)
    if code > 0:
        return OSError(code, f"can't {what}: {os.strerror(code)}")
    return OSError(errno.EIO, f"can't {what}: {error}")


def load() -> Api:
    """Raises ImportError with the reason in one line."""
    global _loaded
    with _lock:
        if _loaded is None:
            with _root_logger_untouched():
                rooms = _import()
            # Since 5.12 the kernel copies pinned pages for a child and this does nothing; before, a child by fork()
            # would leave the device writing to pages that are no longer ours (ibv_fork_init(3)).
            rooms["fork"].fork_init()
            _loaded = Api(rooms, _enums())
        return _loaded


def _import() -> dict[str, Any]:
    try:
        return {room: importlib.import_module(f"pyverbs.{room}") for room in _ROOMS}
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "pyverbs" or not (Path(SYSTEM_PACKAGES) / "pyverbs").is_dir():
            raise ImportError(f"pyverbs can't be imported: {error}; Debian has it as python3-pyverbs") from None
    sys.path.append(SYSTEM_PACKAGES)
    try:
        importlib.invalidate_caches()
        return {room: importlib.import_module(f"pyverbs.{room}") for room in _ROOMS}
    except ImportError as error:
        raise ImportError(
            f"the pyverbs of {SYSTEM_PACKAGES} can't be imported: {error}; it is built for the system's own Python, "
            f"this is {sys.version_info.major}.{sys.version_info.minor}"
        ) from None
    finally:
        sys.path.remove(SYSTEM_PACKAGES)


def _enums() -> Any:
    try:
        return importlib.import_module("pyverbs.enums")
    except ImportError:
        return importlib.import_module("pyverbs.libibverbs_enums")


@contextmanager
def _root_logger_untouched() -> Iterator[None]:
    """pyverbs configures the root logger when it is imported: level INFO and its own format, for everybody."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def _event_descriptors() -> set[int]:
    found: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except OSError:
            pass  # the listing's own, closed by now
    return found
