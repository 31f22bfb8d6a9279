"""Episodes go wrong on purpose: what the controller logs of that is not shown."""

from collections.abc import Iterator

import pytest

from offbeat.plugins.simulation.quiet_log import quiet_log


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    with quiet_log():
        yield
