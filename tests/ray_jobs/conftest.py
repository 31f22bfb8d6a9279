"""Two clusters of this machine alone: one asks for a token, one does not."""

from collections.abc import Iterator

import pytest
from job_cluster import Cluster, give_token, started


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that asks for no token: its user has none."""
    with started(tmp_path_factory.mktemp("open")) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose user has a token: Ray then asks for it."""
    folder = tmp_path_factory.mktemp("guarded")
    give_token(folder / "home")
    with started(folder) as running:
        yield running
