"""The cluster of the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_support import Cluster, why_no_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes; the first test that asks for them starts them."""
    reason = why_no_cluster()
    if reason is not None:
        pytest.skip(reason)
    made = Cluster(tmp_path_factory.mktemp("cluster"), 4)
    yield made
    made.down()


@pytest.fixture(autouse=True)
def _swept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave nothing running in the nodes after a test."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").sweep()
