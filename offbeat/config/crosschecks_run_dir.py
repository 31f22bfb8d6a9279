"""Finds run directories that a recipe cannot have."""

from collections.abc import Iterator

from offbeat.config.base import is_uri
from offbeat.config.clash import Clash
from offbeat.config.run import RunConfig


def run_dir_clashes(config: RunConfig) -> Iterator[Clash]:
    """Check that the run directory is a path, with the name of the run filled in."""
    yield from _run_dir_can_be_filled_in(config)
    yield from _run_dir_is_a_path(config)


def _run_dir_can_be_filled_in(config: RunConfig) -> Iterator[Clash]:
    if set(config.run_dir.replace("{name}", "")) & set("{}"):
        yield Clash(
            ("run_dir",),
            f"run_dir={config.run_dir} has braces around something else than the name of the run",
            "Only {name} is filled in, as in runs/{name}.",
        )


def _run_dir_is_a_path(config: RunConfig) -> Iterator[Clash]:
    if is_uri(config.run_dir):
        yield Clash(
            ("run_dir",),
            f"run_dir={config.run_dir} is a URI: a run writes into a directory of the driver's machine",
            "Name a directory, as in runs/{name}; copy it afterwards, or mount the storage.",
        )
