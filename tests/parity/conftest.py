"""The world of ranks that all suites here share, and the table of what they have measured."""

from collections.abc import Iterator

import pytest
from parity_table import ParityTable
from world import World, a_world


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-parity", action="store_true", help="write docs/parity.md from what is measured"
    )


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    yield from a_world()


@pytest.fixture(scope="session")
def parity_table(request: pytest.FixtureRequest) -> Iterator[ParityTable]:
    table = ParityTable()
    yield table
    if request.config.getoption("--write-parity", default=False):
        table.write()
