import subprocess
import sys
from collections import defaultdict
from enum import IntFlag
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from distserve.transport.rdma.pyverbs_api import Api, Closed
from distserve.transport.rdma.verbs import available


def api(enums: object) -> Api:
    return Api(defaultdict(MagicMock), enums)


def test_constants_are_found_in_a_flat_module_and_in_enum_classes() -> None:
    class Access(IntFlag):
        IBV_ACCESS_REMOTE_WRITE = 2

    assert api(SimpleNamespace(IBV_ACCESS_REMOTE_WRITE=2)).constant("IBV_ACCESS_REMOTE_WRITE") == 2
    found = api(SimpleNamespace(ibv_access_flags=Access, other=1)).constant("IBV_ACCESS_REMOTE_WRITE")
    assert (found, type(found)) == (2, int)
    with pytest.raises(ImportError, match="has no IBV_ACCESS_NONE"):
        api(SimpleNamespace(ibv_access_flags=Access)).constant("IBV_ACCESS_NONE")


def test_what_is_closed_refuses_every_use_by_name() -> None:
    closed = Closed("queue pair 17 of mlx5_0:1")
    with pytest.raises(OSError, match="queue pair 17 of mlx5_0:1 is closed"):
        closed.post_send(None)


def test_looking_for_devices_changes_neither_logging_nor_the_import_path() -> None:
    """pyverbs configures the root logger when it is imported, and may have to be looked for outside the venv."""
    code = (
        "import logging, sys\n"
        "from distserve.transport.rdma import verbs\n"
        "before = list(sys.path), logging.getLogger().level, list(logging.getLogger().handlers)\n"
        "why = verbs.available()\n"
        "assert (sys.path, logging.getLogger().level, logging.getLogger().handlers) == before\n"
        "assert 'pyverbs' in sys.modules or 'pyverbs' in why, why\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_why_there_is_no_device_is_one_line() -> None:
    why = available()
    assert "\n" not in why
    assert why == available()
