"""Configures the process for a checked recipe, then runs it on its runtime."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.config.loader import LoadedRecipe, load_recipe
from offbeat.config.run import RunConfig
from offbeat.config.user_code import check_starts_run
from offbeat.doors import find_plugin
from offbeat.launch.process_environment import set_environment
from offbeat.messages.missing_package import name_missing_package

if TYPE_CHECKING:
    from offbeat.launch.session import RunEnd, Runtime, Session


def launch(
    loaded: LoadedRecipe,
    *,
    run_dir: Path | None,
    dry_run: bool,
    resume: Path | None = None,
    changed_code: bool = False,
    evaluates_only: bool = False,
    spares_prompts: bool = False,
    session: "Session | None" = None,
) -> "RunEnd":
    """Run the recipe, or only its evaluation with ``evaluates_only``.

    With ``spares_prompts`` an evaluation also keeps prompts without a valid sample.

    The exit code is 0 if the run finished, 1 if it failed, 2 for a bad configuration, 129 if the
    terminal hung up, 130 if interrupted, and 143 if terminated.

    Raises:
        StartedByTarget: User code of another run starts this one.
    """
    check_starts_run()
    set_environment(loaded.config.runtime.env)
    from offbeat.launch.session import drive

    try:
        return drive(
            find_runtime(loaded.config),
            loaded,
            run_dir,
            dry_run=dry_run,
            resume=resume,
            changed_code=changed_code,
            evaluates_only=evaluates_only,
            spares_prompts=spares_prompts,
            session=session,
        )
    finally:
        gc.unfreeze()  # ``pause_collections`` froze objects that a caller may own


def find_runtime(config: RunConfig) -> "Runtime":
    """Return the runtime that a recipe chooses. Only Ray's runtime imports Ray.

    Raises:
        PartPackageMissing: Ray is not installed.
    """
    if config.runtime.backend == "local":
        return find_plugin("runtime", "local")
    # Ray reads its variables when it is imported.
    with name_missing_package():
        from offbeat.launch.driver import RAY
    return RAY


def run_recipe(
    recipe: Path | str,
    overrides: Sequence[str] = (),
    *,
    run_dir: Path | str | None = None,
    dry_run: bool = False,
) -> int:
    """Run a recipe as ``offbeat train`` does, and return the exit code of ``launch``.

    This sets environment variables of this process, starts or joins Ray, and stops it at the end.
    So call it only once per process, in the main thread, before Ray is imported.

    Args:
        recipe: A YAML file.
        overrides: Overrides of recipe keys, such as ``["steps=10"]``.
        run_dir: Directory of the run, or None for the recipe's directory.
        dry_run: Run the same code with a stub trainer and stub engines.

    Raises:
        ConfigError: The recipe cannot work. The error lists every problem.
        StartedByTarget: User code of another run starts this one.
    """
    check_starts_run()
    loaded = load_recipe(recipe, overrides, dry_run=dry_run)
    directory = None if run_dir is None else Path(run_dir)
    return launch(loaded, run_dir=directory, dry_run=dry_run).code
