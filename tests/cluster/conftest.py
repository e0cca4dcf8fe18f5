"""The cluster of the tests in this folder."""

from collections.abc import Iterator

import pytest
from cluster_support import Cluster, why_no_cluster
from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

from deepspeed_gear.ops.backends import load_backend


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes; the first test that asks for them starts them."""
    reason = why_no_cluster()
    if reason is not None:
        pytest.skip(reason)
    # Built before the first ranks start: beside other tests a build can outlast a test's timeout.
    load_backend()
    ShareMemCommBuilder().load(verbose=False)
    made = Cluster(tmp_path_factory.mktemp("cluster"), 4)
    yield made
    made.down()


@pytest.fixture(autouse=True)
def _swept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave nothing running in the nodes after a test."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").sweep()
