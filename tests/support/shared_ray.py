"""A Ray of the tests' own process, for the files in a row that need no other."""

import pytest
import ray


@pytest.fixture(scope="module")
def local_ray() -> None:
    """Join it, or start it; ``leave_ray`` stops it."""
    if not ray.is_initialized():
        ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=1)


def leave_ray(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop it after the last test in a row that uses it."""
    uses = [set(getattr(each, "fixturenames", ())) & {"local_ray"} for each in (item, nextitem)]
    if uses[0] and not uses[1]:
        ray.shutdown()
