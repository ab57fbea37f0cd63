"""What `distserve up` says of the way that KV goes."""

from typing import Any

import pytest

from distserve.config import load_config
from distserve.up import moved_by


@pytest.mark.parametrize(
    ("given", "kinds", "said"),
    [
        ({}, ["shm", "tcp"], "shm"),
        ({}, ["shm", "rdma", "tcp"], "shm (rdma above 64 MiB)"),
        ({"zero_copy_threshold_bytes": 3 << 19}, ["shm", "rdma", "tcp"], "shm (rdma above 1.5 MiB)"),
        ({"zero_copy_threshold_bytes": 0}, ["shm", "rdma", "tcp"], "shm"),
        ({}, ["tcp"], "tcp"),
        ({"kind": "tcp"}, ["tcp"], "tcp"),
        ({"kind": "rdma", "allow_fallback": True}, ["rdma", "shm", "tcp"], "rdma"),
        ({"kind": "rdma", "allow_fallback": True}, ["shm", "tcp"], "shm"),  # there was no device
    ],
)
def test_the_banner_names_what_leases_go_by(given: dict[str, Any], kinds: list[str], said: str) -> None:
    config = load_config(overrides={f"transport.{key}": value for key, value in given.items()})
    assert moved_by(config.transport, kinds) == said
