"""Fixtures that every room's tests may use."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from distserve.bus.embedded import EmbeddedNats

# A machine that is busy with something else must not fail a property; pytest-timeout bounds what hangs.
settings.register_profile("distserve", deadline=None)
settings.load_profile("distserve")


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    """One real nats-server for the whole run. Tests share it: use subjects of your own, and a registry_bucket of your
    own where the registry matters."""
    with EmbeddedNats() as server:
        yield server.url


@pytest.fixture
def nats_server() -> Iterator[EmbeddedNats]:
    """A nats-server for one test alone, which may stop, kill and start it again."""
    with EmbeddedNats(monitor=True) as server:
        yield server


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup` whole clusters are started one at a time: two at once would starve each other."""
    for item in items:
        if item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.xdist_group("e2e"))
