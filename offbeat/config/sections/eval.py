"""Defines section ``eval`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config, RecipePath, SectionName


class EvalSetConfig(Config):
    """One of several sets of prompts that are scored under a name of their own."""

    path: RecipePath | None = None
    """File of held-out prompts, as `data.path` has it; relative to the recipe. None: the first
    prompts that the run trains on."""

    columns: dict[str, str] = {}
    """Column of the file under which each key of a row stands, as `data.columns` has it."""

    prompts: Annotated[int, Field(ge=1)] | None = None
    """Prompts of the set, at most. None: as `eval.prompts`."""

    samples: Annotated[int, Field(ge=1)] | None = None
    """Samples of each prompt. None: as `eval.samples`."""


class EvalConfig(Config):
    """Scoring prompts at one weight version: held-out ones with ``path`` or ``sets``."""

    interval: Annotated[int, Field(ge=0)] = 0
    """Steps between two evaluations; 0: none. Frequent ones show progress sooner, and take an
    engine from training each time."""

    at_start: bool = False
    """Whether the weights that the run begins with are scored too, before the first step. On gives
    later scores something to be compared with, and delays the first step with one engine."""

    path: RecipePath | None = None
    """File of held-out prompts, as `data.path` has it; relative to the recipe. None: the first
    ``prompts`` that the run trains on, each once, whose score counts what was learnt by heart
    too."""

    columns: dict[str, str] = {}
    """Column of the file under which each key of a row stands, as `data.columns` has it."""

    sets: dict[SectionName, EvalSetConfig] = {}
    """Sets of prompts instead of the one of `eval.path`, each scored and reported by its name, all
    at the same weight version. More sets hold the engine longer."""

    prompts: Annotated[int, Field(ge=1)] = 64
    """Prompts of a set, at most. More make the score less noisy and hold the engine
    longer."""

    samples: Annotated[int, Field(ge=1)] = 1
    """Samples of each prompt, the k of mean@k, pass@k and maj@k. More make the score of each prompt
    less noisy and hold the engine longer."""

    allow_overlap: bool = False
    """Whether rows may be both trained on and scored. On is for scores that may count what was learnt
    by heart; off ends the run before its first step."""

    correct_from: float = 1.0
    """Reward from which on a sample counts as correct in pass@k and maj@k. Lower it where a correct
    sample may have less, as with a penalty for its length."""

    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Time one evaluation may hold its engine at the version it scores; then it is given up.
    Raise it for many prompts or long responses; a hung one is noticed later."""

    @property
    def paths(self) -> dict[str, str]:
        """The files of prompts, by the key of the recipe that names them."""
        named = {f"eval.sets.{name}.path": each.path for name, each in self.sets.items()}
        return {key: path for key, path in (named or {"eval.path": self.path}).items() if path}

    @property
    def named_sets(self) -> dict[str, EvalSetConfig]:
        """The sets by name, with prompts and samples filled in; the one of ``path`` has no name."""
        sets = self.sets or {"": EvalSetConfig(path=self.path, columns=self.columns)}
        return {
            name: each.model_copy(
                update={
                    "prompts": each.prompts or self.prompts,
                    "samples": each.samples or self.samples,
                }
            )
            for name, each in sets.items()
        }
