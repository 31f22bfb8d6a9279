"""Preview of a recipe before it trains: prompts, answers and rewards."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Final

from offbeat.config.loader import LoadedRecipe
from offbeat.config.mixture import environment_views
from offbeat.config.run import RunConfig
from offbeat.environments.factory import make_environment, make_prompts
from offbeat.environments.tokenizer import load_tokenizer
from offbeat.launch.dry_run import NO_FILE, change_recipe
from offbeat.launch.evaluate import check_can_evaluate
from offbeat.launch.hub_model import with_local_model
from offbeat.launch.launch import launch
from offbeat.launch.process_environment import set_environment
from offbeat.launch.run import RunRefused
from offbeat.launch.session import RunEnd, Session
from offbeat.messages.evaluations import ScoredSample
from offbeat.messages.failures import OffbeatError, ShortInNotebooks
from offbeat.messages.text import cut
from offbeat.rollouts.log_table import rest_of_row
from offbeat.run_files.files import FAILURES
from offbeat.runs.metrics_file import whole_lines
from offbeat.telemetry.evaluation_files import evaluation_files, read_evaluation
from offbeat.telemetry.summary import FEW_SIGNALS

PROMPTS: Final = 16
SAMPLES: Final = 4
_SHOWN: Final = 3
_CHARACTERS: Final = 1200  # of a prompt or a response
_ROW_CHARACTERS: Final = 300
_FIX: Final = "fix the code, or set rollout.on_failed_sample=mask"


class PreviewFailed(ShortInNotebooks, OffbeatError):
    """A preview ended with an error.

    Fix: fix the named error in the environment, reward or model.
    """

    error: str

    def __str__(self) -> str:
        return self.error


_Text = tuple[str, str]  # text of a prompt, and the row's other keys


@dataclass(frozen=True, slots=True)
class PreviewedPrompt:
    """A prompt and the model's answers to it."""

    text: str  # as the model reads it, with special tokens; the row if the text is unknown
    samples: tuple[ScoredSample, ...]
    errors: Mapping[int, str] = field(default_factory=dict[int, str])
    """Errors of the failed samples, by sample number."""
    row: str = ""
    """The row's other keys as JSON, shortened. Empty without any, or if ``text`` is the row."""

    @property
    def rewards(self) -> tuple[float, ...]:
        """Return the rewards of the valid samples."""
        return tuple(each.reward for each in self.samples if each.is_valid)

    @property
    def failed(self) -> int:
        """Return the number of samples with a failed reward, agent or environment."""
        return sum(not each.is_valid for each in self.samples)

    @property
    def has_signal(self) -> bool:
        """Return whether the rewards differ. Otherwise all advantages of the group are 0."""
        return len(set(self.rewards)) > 1

    @property
    def is_one_answer(self) -> bool:
        """Return whether all samples have the same text."""
        texts = {each.response for each in self.samples}
        return len(texts) == 1 < len(self.samples) and None not in texts


@dataclass(frozen=True, slots=True, repr=False)
class Preview:
    """Result of a preview."""

    prompts: tuple[PreviewedPrompt, ...]
    model: str
    """Directory of the model that answered, or a note about the model."""

    @property
    def reward(self) -> float | None:
        """Return the mean reward, or None if every sample has failed."""
        rewards = [reward for each in self.prompts for reward in each.rewards]
        return fmean(rewards) if rewards else None

    @property
    def failed(self) -> int:
        """Return the number of samples with a failed reward, agent or environment."""
        return sum(each.failed for each in self.prompts)

    @property
    def reward_s(self) -> float:
        """Return the seconds in environment and reward, averaged over groups."""
        return fmean(each.samples[0].environment_s or 0.0 for each in self.prompts)

    @property
    def without_signal(self) -> float:
        """Return the fraction of groups in which all samples have the same reward."""
        return fmean(not each.has_signal for each in self.prompts)

    @property
    def truncated(self) -> float:
        """Return the fraction of samples that were cut at the token limit."""
        return fmean(
            each.finish_reason == "length" for prompt in self.prompts for each in prompt.samples
        )

    def to_text(self) -> str:
        """Format the preview as text with a final newline."""
        return "\n".join([*self._examples(), *self._figures(), self.verdict]) + "\n"

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__  # a notebook shows it for the last line of a cell

    def _examples(self) -> Iterator[str]:
        for number, prompt in self._shown():
            yield f"prompt {number}"
            yield _indent(prompt.text)
            if prompt.row:
                yield f"  row {cut(prompt.row, _ROW_CHARACTERS)}"
            for each in prompt.samples:
                yield f"  {_outcome(each, prompt.errors)}"
                yield _indent("" if each.response is None else each.response, by=6)
            yield ""

    def _shown(self) -> Iterator[tuple[int, PreviewedPrompt]]:
        """Yield the first prompts by number. If none has a failed sample, add one that has."""
        numbered = list(enumerate(self.prompts, start=1))
        yield from numbered[:_SHOWN]
        has_failed = [prompt.failed > 0 for prompt in self.prompts]
        if not any(has_failed[:_SHOWN]) and any(has_failed):
            yield numbered[has_failed.index(True)]

    def _figures(self) -> Iterator[str]:
        count = len(self.prompts)
        samples = sum(len(each.samples) for each in self.prompts)
        mean = "-" if self.reward is None else f"{self.reward:.3f}"
        yield f"{'model':16} {self.model}"
        yield f"{'prompts':16} {count}, {samples} samples"
        yield f"{'reward':16} {mean} on average"
        if self.failed:
            yield f"{'failed':16} {self.failed} of {samples} samples: {_FIX}"
        yield f"{'time per group':16} {self.reward_s:.3g} s in environment and reward"
        yield f"{'cut':16} {self.truncated:.0%} of the samples, at the limit of tokens"
        yield f"{'without signal':16} {self.without_signal:.0%} of the groups: all rewards are equal"

    @property
    def verdict(self) -> str:
        """Return one sentence on whether the rewards contain anything to learn from."""
        if self.reward is None:
            return "Every sample has failed: training would end at the first one."
        share = 1.0 - self.without_signal
        if not share and all(each.is_one_answer for each in self.prompts):
            return (
                "All answers to a prompt are equal, so there is nothing to learn from. Raise "
                "generator.sampling.temperature, or leave out its filters: top_k, top_p, min_p."
            )
        if not share:
            rewards = {reward for each in self.prompts for reward in each.rewards}
            same = f": every reward is {rewards.pop():g}" if len(rewards) == 1 else ""
            return f"There is nothing to learn from{same}. Change the prompts, the reward or the model."
        if share < FEW_SIGNALS:
            return f"Only {share:.0%} of the groups have something to learn from: expect slow progress."
        return f"{share:.0%} of the groups have something to learn from."


def _outcome(sample: ScoredSample, errors: Mapping[int, str]) -> str:
    """Return the reward of a sample as text, or why it has none."""
    if not sample.is_valid:
        return f"failed: {errors.get(sample.sample, sample.finish_reason)}"
    return f"reward {sample.reward:g}, {sample.response_tokens} tokens, {sample.finish_reason}"


def preview_recipe(
    loaded: LoadedRecipe, *, prompts: int = PROMPTS, samples: int = SAMPLES, note: str = ""
) -> Preview:
    """Sample the first prompts of a recipe with its engines and reward them, without training.

    Nothing is kept on disk.

    Args:
        loaded: The recipe.
        prompts: Number of prompts.
        samples: Number of samples per prompt.
        note: Description of the model, by default its path.

    Raises:
        NothingToEvaluate: The recipe samples nothing.
        RunRefused: This machine or an input does not allow the run.
        PreviewFailed: Every sample failed, or the preview ended with another error.
        KeyboardInterrupt: The preview was interrupted.
    """
    set_environment(loaded.config.runtime.env)  # before transformers is imported
    check_can_evaluate(loaded.config)
    try:
        config = _only_sampled(with_local_model(loaded.config, _ignore), prompts, samples)
        texts = _prompt_texts(config)
    except OffbeatError as error:
        raise RunRefused((str(error),)) from error
    with TemporaryDirectory(prefix="offbeat-preview-") as folder:
        directory = Path(folder) / "run"
        end = launch(
            replace(loaded, config=config),
            run_dir=directory,
            dry_run=False,
            evaluates_only=True,
            spares_prompts=True,
            session=Session.silent(),
        )
        errors = _read_errors(directory)
        shown = Preview(
            tuple(_build_prompts(_read_scored(end, directory), texts, errors)),
            note or loaded.config.model.path,
        )
    if shown.reward is None:
        raise PreviewFailed(
            f"every sample failed ({shown.failed}): {next(iter(errors.values()), '')}"
        )
    return shown


def _read_errors(directory: Path) -> dict[tuple[str, int, int], str]:
    """Return why samples failed, by environment, row and number."""
    path = directory / FAILURES
    records = [json.loads(line) for _, line in whole_lines(path)] if path.exists() else []
    return {
        (each["environment"], each["row_index"], each["sample"]): each["detail"] for each in records
    }


def _ignore(line: str) -> None:
    """Ignore a progress line of a download."""


def _only_sampled(config: RunConfig, prompts: int, samples: int) -> RunConfig:
    """Return a recipe with an evaluation that samples the first training prompts."""
    values: dict[str, Any] = config.model_dump()
    for section in values["environments"].values():
        section["eval"] |= NO_FILE
    values["rollout"] |= {"on_failed_sample": "mask", "min_valid_samples": None}
    counts: dict[str, Any] = {"sets": {}, "prompts": prompts, "samples": samples, "interval": 1}
    return change_recipe(values, {"eval": {**NO_FILE, **counts}})


def _read_scored(end: RunEnd, directory: Path) -> Sequence[ScoredSample]:
    if end.problems:
        raise RunRefused(end.problems)
    if end.summary is None or end.summary.outcome == "aborted":
        raise KeyboardInterrupt("before the preview was done")
    if end.summary.outcome == "failed":
        raise PreviewFailed(end.summary.error or "")
    return read_evaluation(evaluation_files(directory)[-1][1]).samples


def _build_prompts(
    scored: Sequence[ScoredSample],
    texts: Mapping[tuple[str, int], _Text],
    errors: Mapping[tuple[str, int, int], str],
) -> Iterator[PreviewedPrompt]:
    groups = dict[tuple[str, int], list[ScoredSample]]()
    for each in scored:
        groups.setdefault((each.set, each.prompt_index), []).append(each)
    for key, samples in groups.items():
        text, row = texts.get(key, (samples[0].prompt or "", ""))
        keys = {each.sample: (each.set, each.row, each.sample) for each in samples}
        found = {sample: errors[key] for sample, key in keys.items() if key in errors}
        yield PreviewedPrompt(text, tuple(samples), found, row)


def _prompt_texts(config: RunConfig) -> dict[tuple[str, int], _Text]:
    """Return the first prompts as the model reads them, by set and position in the set.

    Prompts of an agent and prompts with media have no such text, so their row is shown.
    """
    texts = dict[tuple[str, int], _Text]()
    tokenizer = load_tokenizer(config)
    for name, view in environment_views(config).items():
        if view.environment.is_agent:
            continue
        environment = make_environment(view.environment, tokenizer, Path.cwd())
        source = make_prompts(view)
        for index in range(config.eval.prompts):
            if (prompt := source.prompt(index)) is None:
                break
            try:
                encoded = environment.encode(prompt)
            except Exception:  # noqa: BLE001, S112 - the checks, or the run itself, report it
                continue
            if encoded and isinstance(encoded, tuple) and tokenizer is not None:
                text, row = tokenizer.decode(encoded), rest_of_row(prompt.data) or ""
                texts[name, index] = text, row
    return texts


def _indent(text: str, by: int = 4) -> str:
    shown = cut(text, _CHARACTERS)
    return "\n".join(" " * by + line for line in (shown.splitlines() or [""]))
