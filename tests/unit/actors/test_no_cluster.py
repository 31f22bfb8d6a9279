"""Tests without the marker ``ray`` belong to no cluster, not even to one of another test process."""

import pytest
import ray
from ray.exceptions import RaySystemError


def test_a_call_that_needs_a_cluster_neither_starts_nor_joins_one() -> None:
    with pytest.raises(RaySystemError, match="Ray has not been started"):
        ray.kill(object())  # type: ignore[arg-type]  # no handle of an actor
    assert not ray.is_initialized()
