"""Clusters of real processes, one a module at most."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.reference import Reference
from tests.tiny_models import make_tiny


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="session")
def reference(tiny_llama: Path) -> Reference:
    return Reference(tiny_llama)


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The tiny Llama, one prefill and one decode worker."""
    with Cluster(tiny_llama, tmp_path_factory.mktemp("cluster")) as c:
        yield c
        c.wait_until_idle()
