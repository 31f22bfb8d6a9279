"""Starts the real command in a directory per run."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from tests.support.live_run import LiveRun

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).with_name("stub.yaml")
Start = Callable[..., LiveRun]


def make_start(directory: Path, runtime: str = "ray", *, is_warm: bool = False) -> Start:
    """Return a function that begins a run: ``with start("name", recipe, "steps=3") as run``.

    A run that is resumed keeps the runtime that its directory names. ``is_warm``: see ``LiveRun``.
    """

    def begin(
        name: str,
        recipe: Path | None,
        *overrides: str,
        command: str = "train",
        cwd: Path = directory,
        environment: Mapping[str, str] = MappingProxyType({}),
        is_warm: bool = is_warm,
    ) -> LiveRun:
        given = [] if recipe is None else [str(recipe), "wandb.mode=disabled", f"runtime={runtime}"]
        return LiveRun(
            [command, *given, *overrides],
            run_dir=directory / name,
            cwd=cwd,
            environment=environment,
            is_alone=runtime == "local",
            is_warm=is_warm,
        )

    return begin
