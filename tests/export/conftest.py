"""Fabricated runs whose metrics are exported; a tool that is not installed skips its test by name."""

from pathlib import Path

import pytest

from tests.support.shown_run import with_losses


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.export)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that lost its trainer, so that steps were undone, and its controller."""
    recipe = {"groups_per_step": 8, "samples_per_group": 8}
    return with_losses(tmp_path_factory.mktemp("runs") / "one", steps=40, recipe=recipe)
