"""Defines section ``eval`` of a recipe."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config, RecipePath, SectionName
from offbeat.config.problems import Clash


class EvalSetConfig(Config):
    """One of several named sets of prompts."""

    path: RecipePath | None = None
    """Held-out prompts, as in `data.path`, relative to the recipe. null: the first prompts of
    training."""

    columns: dict[str, str] = {}
    """Column for each key of a row, as in `data.columns`."""

    prompts: Annotated[int, Field(ge=1)] | None = None
    """Maximum prompts of the set. null: `eval.prompts`."""

    samples: Annotated[int, Field(ge=1)] | None = None
    """Samples per prompt. null: `eval.samples`."""


class EvalConfig(Config):
    """Scoring prompts at one weight version: held-out ones with ``path`` or ``sets``."""

    interval: Annotated[int, Field(ge=0)] = 0
    """Steps between two evaluations. 0: none. An evaluation occupies one engine, which training
    cannot use meanwhile."""

    at_start: bool = False
    """Also score the initial weights before the first step."""

    path: RecipePath | None = None
    """Held-out prompts, as in `data.path`, relative to the recipe. null: the first `eval.prompts`
    prompts of training, each once."""

    columns: dict[str, str] = {}
    """Column for each key of a row, as in `data.columns`."""

    sets: dict[SectionName, EvalSetConfig] = {}
    """Several named sets, instead of `eval.path`, scored at the same weight version."""

    prompts: Annotated[int, Field(ge=1)] = 64
    """Maximum prompts per set."""

    samples: Annotated[int, Field(ge=1)] = 1
    """Samples per prompt: the k of mean@k, pass@k and maj@k."""

    allow_overlap: bool = False
    """Allow rows that are both trained and scored. Otherwise the run ends before its first step."""

    correct_from: float = 1.0
    """Minimum reward of a correct sample, for pass@k and maj@k. Lower it if correct samples can get
    less."""

    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds for an evaluation, after which it is given up."""

    def find_clashes(self) -> Iterator[Clash]:
        if self.sets and self.path is not None:
            yield Clash(
                ("eval.path", "eval.sets"),
                "eval.path is not used: eval.sets names the sets that are scored",
                "Make it a named set, as in eval.sets.held_out.path, or leave it out.",
            )
        if self.at_start and not self.interval:
            yield Clash(
                ("eval.at_start", "eval.interval"),
                "eval.at_start does nothing with eval.interval=0: nothing is evaluated",
                "Set eval.interval to the steps between two evaluations.",
            )

    @property
    def paths(self) -> dict[str, str]:
        """Return the prompt files, by the recipe key that names them."""
        named = {f"eval.sets.{name}.path": each.path for name, each in self.sets.items()}
        return {key: path for key, path in (named or {"eval.path": self.path}).items() if path}

    @property
    def named_sets(self) -> dict[str, EvalSetConfig]:
        """Return the sets by name, with prompts and samples filled in; "" names ``path``'s set."""
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
