"""Evaluation only: the run of a recipe without its training."""

from pathlib import Path
from typing import Any, Final

from rich.console import Group, RenderableType

from offbeat.algorithms.eval_scores import scores_by_set
from offbeat.config.run import RunConfig
from offbeat.config.sections.trainer import StubTrainerConfig
from offbeat.launch.dry_run import change_recipe, kept
from offbeat.messages.failures import FixableError
from offbeat.messages.groups import Prompt
from offbeat.telemetry.evaluation_files import evaluation_files, read_evaluation, render_scores
from offbeat.telemetry.hub import change_trackers

_CONFIG: Final = "config.yaml"
_MODEL: Final = "config.json"


class NothingToEvaluate(FixableError):
    """The argument of ``offbeat eval`` names neither a recipe nor a model of a run.

    Fix: pass a recipe, or set ``model.path`` to an exported model.
    """

    form = "{} {}. {}"


class NoPrompts:
    """Prompt source without prompts, so that a run trains no step."""

    rows = 0

    def prompt(self, prompt_index: int) -> Prompt | None:
        del prompt_index
        return None


def check_can_evaluate(config: RunConfig) -> None:
    """Check that the engines of a recipe can serve weights that no trainer has sent.

    Raises:
        NothingToEvaluate: The engines cannot.
    """
    backend = config.generator.backend
    if backend == "none":
        problem = "starts no engine, so this recipe cannot sample answers"
        fix = (
            "Evaluate the model by a recipe that samples: offbeat eval RECIPE model.path=DIRECTORY"
        )
        raise NothingToEvaluate(f"generator.backend={backend}", problem, fix)
    if config.sync.quantize is not None:
        problem = (
            "starts engines that need weights quantized by a trainer, but an evaluation "
            "has no trainer"
        )
        fix = "Evaluate the unquantized model: sync.quantize=null"
        raise NothingToEvaluate(f"sync.quantize={config.sync.quantize}", problem, fix)


def evaluation_only(config: RunConfig) -> RunConfig:
    """Return the run that scores ``model.path`` once on the recipe's engines and trains nothing."""
    values: dict[str, Any] = config.model_dump()
    values["trainer"] = kept(values["trainer"], StubTrainerConfig)
    changes: dict[str, dict[str, Any]] = {
        "trainer": {"backend": "stub", "cpus": 0.0, "gpus": 0.0},
        "generator": {"min_engines": 1},
        "checkpoint": {"interval": 0, "final": False},
        "eval": {"interval": 1, "at_start": True},
    }
    change_trackers(values, config, lambda tracker, section: tracker.for_evaluation(section))
    return change_recipe(values, changes, steps=1, name=f"{config.name}-eval")


def render_evaluation(run_dir: Path) -> RenderableType:
    """Render the scores of an evaluation run, and where its samples are."""
    files = evaluation_files(run_dir)
    if not files:
        return f"nothing was scored; {run_dir}"
    path = files[-1][1]
    return Group(render_scores(scores_by_set(read_evaluation(path).samples)), f"samples: {path}")


def recipe_and_model(what: Path) -> tuple[Path, list[str]]:
    """Return the recipe for the argument of ``offbeat eval``, and the overrides for its model.

    A file is a recipe. A directory is a run or an exported model of a run, ``checkpoints/step_N``.
    For a run, the newest exported model is scored.

    Raises:
        NothingToEvaluate: The argument is none of these.
    """
    if not what.is_dir():
        return what, []
    if (what / _CONFIG).exists():
        steps = [path for path in what.glob("checkpoints/step_*") if _step(path) is not None]
        models = [path for path in steps if (path / _MODEL).exists()]
        if steps and not models:
            fix = "Run the recipe without --dry-run first"
            raise NothingToEvaluate(str(what), "is a dry run, which trains a stub", fix)
        if not models:
            fix = "Name a recipe, with model.path=DIR; a run writes its model at its end"
            raise NothingToEvaluate(str(what), "holds no exported model (checkpoints/step_N)", fix)
        newest = max(models, key=lambda path: _step(path) or 0)
        return what / _CONFIG, _model_is(newest)
    recipe = what.absolute().parent.parent / _CONFIG
    if what.name.startswith("state_"):
        fix = "Name checkpoints/step_N, or resume the run: it exports its model at its end"
        raise NothingToEvaluate(str(what), "is a trainer's state, not a model", fix)
    if not recipe.exists() or not (what / _MODEL).exists():
        fix = f"Name a recipe, with model.path={what} if that is a model"
        raise NothingToEvaluate(str(what), "is neither a run nor an exported model of one", fix)
    return recipe, _model_is(what)


def _model_is(directory: Path) -> list[str]:
    """Return the overrides that make a run's recipe read this model, and no other weights."""
    return [f"model.path={directory.absolute()}", "model.weights=null"]


def _step(path: Path) -> int | None:
    number = path.name.removeprefix("step_")
    return int(number) if number.isdigit() else None
