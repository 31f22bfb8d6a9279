"""Runs from Python: ``train``, ``start`` and ``resume`` are thin wrappers around recipes."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from offbeat.config.keywords import (
    bad_argument,
    check_names,
    format_overrides,
    name_arguments,
)
from offbeat.config.loader import LoadedRecipe, load_recipe
from offbeat.config.problems import ConfigError
from offbeat.config.user_code import check_starts_run
from offbeat.launch.given_rows import prompt_path
from offbeat.launch.launch import launch
from offbeat.launch.process_environment import import_progress_bars
from offbeat.launch.run import LiveRun, NoRunInDirectory, Run, make_ended_run
from offbeat.runs.directory import CONFIG

if TYPE_CHECKING:
    from offbeat.launch.preview import Preview
    from offbeat.launch.session import RunEnd, Session

Function = Callable[..., Any] | str
"""A function or class, by value or as ``module:name``."""

Rewards = Function | Sequence[Function] | Mapping[str, Function | Mapping[str, Any]]
"""A reward, a list of them, or rewards by name, as functions or sections ``environment.rewards.NAME``."""

LossGiven = Function | Mapping[str, Any]
"""A loss function, or a dict with the section ``algorithm.loss``."""

_FORMS: Final = "Give a function, a list or a dict of them."


def train(
    recipe: Path | str | None = None,
    *,
    model: os.PathLike[str] | str | Mapping[str, Any] | None = None,
    prompts: Any = None,
    eval_prompts: Any = None,
    reward: Rewards | None = None,
    agent: Function | None = None,
    loss: LossGiven | None = None,
    run_dir: Path | str | None = None,
    dry_run: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """Train a model, and return the run when it has ended.

    A run with one rank and the embedded engine runs in this process, unless ``runtime`` or the
    variable ``RAY_ADDRESS`` is set. Any other run uses Ray. ``train`` works in any thread, inside a
    running event loop, and for several runs in one process. Ctrl-C, or an interrupted cell, ends
    the run cleanly.

    Args:
        recipe: A YAML file. The other arguments override its keys.
        model: Directory of the model, its name on the hub, or a dict with the section ``model``.
        prompts: A path, a path on the hub, a ``Dataset``, a ``DataFrame``, or a list of dicts with
            ``prompt`` or ``messages``. Rows are written to a file next to the run's directory.
        eval_prompts: The same for evaluations. ``eval={"interval": N}`` is required and sets how
            often they run.
        reward: ``reward(row, response) -> float``, by value or as ``module:name``. For a sum of
            several rewards, pass a list or ``{"short": {"target": short, "weight": 0.5}, ...}``.
            Rewards in a list are named after their functions.
        agent: ``agent(task, client) -> float``, by value or as ``module:name``.
        loss: ``loss(tokens, options)``, which returns the loss of each token, by value or as
            ``module:name``; or a dict with the section ``algorithm.loss``.
        run_dir: Directory of the run, or None for the recipe's.
        dry_run: Run the same code with a stub trainer and stub engines.
        quiet: Print nothing.
        settings: Keys of the recipe: whole sections as dicts, or single keys. A key is written with
            dots, or only with its last part if that is unique, such as ``learning_rate``.

    Raises:
        ConfigError: The recipe cannot work. The error lists every problem.
        BadRows: Prompts are not rows, or hold a value that JSON would change.
        RunRefused: This machine or an input does not allow the run; ``offbeat check`` says why.
        TrainingFailed: The run ended with an error.
        RunInterrupted: The run was interrupted, and ``resume`` can continue it.
    """
    check_names(train, (resume,), settings)
    given = _Given(model, prompts, eval_prompts, reward, agent, loss, settings)
    session = _session(quiet=quiet)
    return make_ended_run(_prepare(recipe, run_dir, session, given, dry_run=dry_run)())


def start(
    recipe: Path | str | None = None,
    *,
    model: os.PathLike[str] | str | Mapping[str, Any] | None = None,
    prompts: Any = None,
    eval_prompts: Any = None,
    reward: Rewards | None = None,
    agent: Function | None = None,
    loss: LossGiven | None = None,
    run_dir: Path | str | None = None,
    dry_run: bool = False,
    **settings: Any,
) -> LiveRun:
    """Start a run as ``train`` does, but in the background, and return it. Print nothing.

    Raises:
        ConfigError, BadRows, RunRefused: As ``train``.
    """
    check_names(start, (train, resume), settings)
    given = _Given(model, prompts, eval_prompts, reward, agent, loss, settings)
    session = _session(quiet=True)
    return LiveRun(session, _prepare(recipe, run_dir, session, given, dry_run=dry_run))


def preview(
    recipe: Path | str | None = None,
    *,
    model: os.PathLike[str] | str | Mapping[str, Any] | None = None,
    prompts: Any = None,
    reward: Rewards | None = None,
    agent: Function | None = None,
    loss: LossGiven | None = None,
    **settings: Any,
) -> "Preview":
    """Sample the first prompts of a run and reward them, before it trains.

    It shows prompts as the model reads them, answers with their rewards, and the share of groups
    without signal. Arguments as in ``train``.

    Raises:
        ConfigError, BadRows, RunRefused: As ``train``.
        PreviewFailed: The preview ended with an error.
    """
    from offbeat.launch.preview import preview_recipe  # slow to import

    check_starts_run()
    check_names(preview, (train, resume), settings)
    given = _Given(model, prompts, None, reward, agent, loss, {"steps": 1, **settings})
    with TemporaryDirectory(prefix="offbeat-preview-") as folder:
        return preview_recipe(_load_recipe(recipe, given.in_recipe(Path(folder)), dry_run=False))


def resume(
    run_dir: Path | str,
    *,
    reward: Rewards | None = None,
    agent: Function | None = None,
    loss: LossGiven | None = None,
    changed_code: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """Continue a run that was interrupted, killed or has failed, and return it when it has ended.

    Pass every object again that was passed by value: its digest is compared with the recorded one.

    Args:
        run_dir: Directory of the run.
        reward: As in ``train``.
        agent: As in ``train``.
        loss: As in ``train``.
        changed_code: Continue although the code of reward, environment, sampler or loss has
            changed.
        quiet: Print nothing.
        settings: Keys of the recipe to change, such as ``steps``.

    Raises:
        NoRunInDirectory: The directory holds no run.
        ConfigError, RunRefused, TrainingFailed, RunInterrupted: As ``train``.
    """
    check_starts_run()
    import_progress_bars()
    for name in ("model", "prompts", "eval_prompts"):
        if name in settings:
            hint = "Leave it out: a resumed run keeps its own"
            raise bad_argument(name, "it is fixed for a resume", hint)
    check_names(resume, (train,), settings)
    directory = Path(run_dir)
    if not (directory / CONFIG).exists():
        raise NoRunInDirectory(
            str(directory), "it has no run to resume", "Name the directory of a run"
        )
    given = _Given(reward=reward, agent=agent, loss=loss, settings=settings)
    keys = given.in_recipe(directory)
    try:
        loaded = load_recipe(directory / CONFIG, format_overrides(keys))
    except ConfigError as error:
        raise name_arguments(error, keys) from None
    session = _session(quiet=quiet)
    return make_ended_run(
        launch(
            loaded,
            run_dir=None,
            dry_run=False,
            resume=directory,
            changed_code=changed_code,
            session=session,
        )
    )


def compose_object_overrides(reward: Rewards | None, agent: Function | None) -> list[str]:
    """Return the overrides that put these objects into a recipe, each as in ``train``."""
    return format_overrides(_Given(reward=reward, agent=agent).in_recipe(Path()))


class _Given(NamedTuple):
    """Arguments of a run, as in ``train``."""

    model: os.PathLike[str] | str | Mapping[str, Any] | None = None
    prompts: Any = None
    eval_prompts: Any = None
    reward: Rewards | None = None
    agent: Function | None = None
    loss: LossGiven | None = None
    settings: Mapping[str, Any] = {}

    def in_recipe(self, folder: Path) -> dict[str, Any]:
        """Return the arguments as keys of a recipe, and write rows into ``folder``."""
        keys = dict[str, Any]()
        if self.model is not None:
            _check_model(self.model)
            keys["model" if isinstance(self.model, Mapping) else "model.path"] = self.model
        if self.prompts is not None:
            keys["data.path"] = prompt_path(self.prompts, folder)
        if self.eval_prompts is not None:
            keys["eval.path"] = prompt_path(self.eval_prompts, folder, "eval_prompts")
        if self.reward is not None:
            keys |= {"environment.name": "function", **_targets(self.reward)}
        if self.agent is not None:
            keys |= {"environment.name": "agent", "environment.target": self.agent}
        if self.loss is not None:
            keys |= _loss_keys(self.loss)
        return {**keys, **self.settings}


def _check_model(model: object) -> None:
    """Check that a model is given by name.

    Raises:
        ConfigError: The model is an object.
    """
    if not isinstance(model, str | os.PathLike | Mapping):
        hint = "Give its directory, or OWNER/NAME of the hub: each process of a run loads it."
        raise bad_argument("model", f"it has the type {type(model).__name__}", hint)


def _targets(reward: Rewards) -> dict[str, Any]:
    """Return the key for one function, or for several by name."""
    if isinstance(reward, str) or callable(reward):
        return {"environment.target": reward}
    if not reward:
        raise bad_argument("reward", "it is empty: nothing scores the prompts", _FORMS)
    if not isinstance(reward, Mapping):
        if not isinstance(reward, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance] -- a caller may have no types
            problem = f"it has the type {type(reward).__name__}"
            raise bad_argument("reward", problem, _FORMS)
        names = [_name_function(each) for each in reward]
        if twice := [name for name in names if names.count(name) > 1]:
            problem = f"several functions are called {twice[0]}"
            hint = f"Give them names: reward={{'first': ..., {twice[0]!r}: ...}}."
            raise bad_argument("reward", problem, hint)
        reward = dict(zip(names, reward, strict=True))
    return {
        "environment.rewards": {name: _make_section(name, each) for name, each in reward.items()}
    }


def _loss_keys(loss: LossGiven) -> dict[str, Any]:
    if isinstance(loss, Mapping):
        return {"algorithm.loss": loss}
    if isinstance(loss, str) or callable(loss):  # pyright: ignore[reportUnnecessaryIsInstance] -- as above
        return {"algorithm.loss.name": "custom", "algorithm.loss.target": loss}
    hint = "Give a function, module:function, or a section as loss={'name': 'gspo'}."
    raise bad_argument("loss", f"it has the type {type(loss).__name__}", hint)


def _make_section(name: str, reward: Function | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(reward, str) or callable(reward):
        return {"target": reward}
    if isinstance(reward, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] -- as above
        return reward
    problem = f"{name} has the type {type(reward).__name__}"
    hint = f"Give a function, or {{'target': FUNCTION, 'weight': 0.5}}, for {name!r}."
    raise bad_argument("reward", problem, hint)


def _name_function(function: Function) -> str:
    if isinstance(function, str):
        return function.rpartition(":")[2]
    inner = function.func if isinstance(function, partial) else function
    return str(getattr(inner, "__name__", type(inner).__name__)).strip("<>")


def _session(*, quiet: bool) -> "Session":
    from offbeat.launch.session import Session  # slow to import

    return Session.silent() if quiet else Session(in_python=True)


def _prepare(
    recipe: Path | str | None,
    run_dir: Path | str | None,
    session: "Session",
    given: _Given,
    *,
    dry_run: bool,
) -> Callable[[], "RunEnd"]:
    """Return the function that executes the run."""
    check_starts_run()
    directory = None if run_dir is None else Path(run_dir)
    folder = Path("runs") if directory is None else directory.absolute().parent
    loaded = _load_recipe(recipe, given.in_recipe(folder), dry_run=dry_run)
    return partial(launch, loaded, run_dir=directory, dry_run=dry_run, session=session)


def _load_recipe(
    recipe: Path | str | None, settings: Mapping[str, Any], *, dry_run: bool
) -> LoadedRecipe:
    """Load the recipe. Choose the one-process runtime if none is chosen and the recipe fits."""
    import_progress_bars()
    _check_recipe(recipe)
    overrides = format_overrides(settings)
    if recipe is None:
        _check_has_reward(overrides)
    try:
        loaded = _with_runtime(recipe, overrides, dry_run=dry_run)
    except ConfigError as error:
        raise name_arguments(error, settings) from None
    if "eval.path" in settings and not loaded.config.eval.interval:
        hint = "Give eval={'interval': N} too, the steps between two evaluations."
        raise bad_argument("eval_prompts", "eval.interval is 0, so they are never scored", hint)
    return loaded


def _check_recipe(recipe: object) -> None:
    """Check that the first argument names a file, and not a model or a run.

    Raises:
        ConfigError: The argument does not name a file.
    """
    if recipe is None:
        return
    if not isinstance(recipe, str | os.PathLike):
        problem = f"it has the type {type(recipe).__name__}, but a recipe is a YAML file"
        hint = (
            "Give keys as arguments: offbeat.train(model=..., steps=...), or offbeat.train(**keys)."
        )
        raise bad_argument("recipe", problem, hint)
    path = Path(recipe)  # pyright: ignore[reportUnknownArgumentType] -- of any path
    hint_by_file = {
        CONFIG: f"Continue a run: offbeat.resume({str(path)!r}).",
        "config.json": f"Give a model by name: model={str(path)!r}.",
    }
    if path.is_dir():
        hints = (hint for file, hint in hint_by_file.items() if (path / file).exists())
        hint = next(hints, "Name a YAML file.")
        raise bad_argument("recipe", f"{path} is a directory, but a recipe is a YAML file", hint)


def _check_has_reward(overrides: Sequence[str]) -> None:
    """Check that a run without a recipe file has both prompts and a reward, or neither.

    Raises:
        ConfigError: It has only one of the two.
    """
    keys = {each.partition("=")[0] for each in overrides}
    sections = {key.partition(".")[0] for key in keys}
    if "data.path" in keys and sections.isdisjoint({"environment", "environments"}):
        hint = "Pass reward=FUNCTION with FUNCTION(row, response) -> float, or agent=FUNCTION."
        raise bad_argument("reward", "it is missing: nothing scores the prompts", hint)
    if 'environment.name="function"' in overrides and sections.isdisjoint({"data", "environments"}):
        hint = "Pass prompts=ROWS: a list of dicts, a DataFrame, a Dataset or a path."
        raise bad_argument("prompts", "it is missing: the reward has nothing to score", hint)


def _with_runtime(
    recipe: Path | str | None, overrides: Sequence[str], *, dry_run: bool
) -> LoadedRecipe:
    as_given = partial(load_recipe, recipe, dry_run=dry_run)
    if os.environ.get("RAY_ADDRESS"):
        return as_given(overrides)
    try:
        local = as_given(["runtime=local", *overrides])
    except ConfigError:
        return as_given(overrides)
    loaded = as_given(overrides)
    return loaded if "runtime.backend" in loaded.origins else local
