"""Checks that prompts leave room for a response, on the longest rows of the files."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from offbeat.config.run import RunConfig
from offbeat.environments.demonstrations import Demonstrations
from offbeat.environments.factory import make_environment, make_evaluation_sets, make_prompts
from offbeat.environments.hub_files import NO_COMMITS
from offbeat.environments.inputs import eval_key
from offbeat.environments.prompt_files import FilePrompts
from offbeat.environments.protocol import EncodedPrompt, Environment
from offbeat.environments.text import Tokenizer
from offbeat.launch.checks.finding import Finding, error, ok, warning
from offbeat.messages.failures import OffbeatError
from offbeat.messages.groups import Prompt

_LONGEST_ROWS: Final = 200
_WITHIN_S: Final = 2.0  # for each file


def check_prompt_lengths(
    config: RunConfig, commits: Mapping[str, str] = NO_COMMITS
) -> Iterator[Finding]:
    """Tokenise the longest rows of the prompt files; code of custom environments is not run.

    ``commits`` are those of paths on the hub.
    """
    if config.environment.name not in {"function", "gsm8k", "demonstrations"}:
        return
    if config.environment.images is not None:
        return  # encoded with their pictures by check_pictures
    from transformers import AutoTokenizer

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
            config.model.path,
            local_files_only=True,
            trust_remote_code=config.model.trust_remote_code,
        )
        environment = make_environment(config.environment, tokenizer, Path.cwd())
        sets = {
            eval_key(name): each for name, each in make_evaluation_sets(config, commits).items()
        }
        files = {"data.path": make_prompts(config, commits), **sets}
    except (OSError, ValueError, OffbeatError):
        return  # reported by the checks of the model, the files and the target
    for key, prompts in files.items():
        if isinstance(prompts, FilePrompts) and (key == "data.path" or key in config.eval.paths):
            unknown = getattr(tokenizer, "unk_token_id", None)
            yield from _longest(config, key, prompts, environment, unknown)


def _longest(
    config: RunConfig,
    key: str,
    prompts: FilePrompts,
    environment: Environment,
    unknown: int | None,
) -> Iterator[Finding]:
    limit, give_up_at = config.generator.max_model_len, time.monotonic() + _WITHIN_S
    looked_at, too_long, longest, lossy = 0, list[int](), 0, list[int]()
    for prompt in prompts.longest(_LONGEST_ROWS):
        if time.monotonic() > give_up_at:
            break
        try:
            tokens, least = _tokens(environment, prompt)
        except Exception as broken:  # noqa: BLE001 - a chat template may raise anything
            seen = f"row {prompt.row} of {key} cannot be tokenised: {broken}"
            yield warning("prompts", seen, "Fix the row, or the model's chat template.")
            return
        looked_at, longest = looked_at + 1, max(longest, len(tokens))
        too_long += [prompt.row] if len(tokens) + least > limit else []
        lossy += [prompt.row] if unknown in tokens else []
    summary = f"the {looked_at} longest of {prompts.rows} rows in {key} were tokenised"
    if too_long:
        seen = (
            f"{summary}: {len(too_long)} leave no room in generator.max_model_len={limit}, the longest "
            f"has {longest} tokens (row {too_long[0]}, counted from 0)"
        )
        fix = "Take them out, or raise generator.max_model_len: they fail their group."
        finding = error if _ends_run(config, key, prompts, len(too_long)) else warning
        yield finding("prompts", seen, fix)
    else:
        yield ok("prompts", f"{summary}: {longest} tokens at most")
    if lossy:
        seen = (
            f"{summary}: {len(lossy)} have text that the tokenizer of model.path does not know, the "
            f"first is row {lossy[0]}; the model reads its unknown token there"
        )
        yield warning("prompts", seen, "Write the rows in the tokenizer's characters.")


def _ends_run(config: RunConfig, key: str, prompts: FilePrompts, too_long: int) -> bool:
    """Return whether a run over these rows is sure to end by the groups that it has to drop."""
    comes_to_all = config.steps * config.groups_per_step >= prompts.rows
    spends_budget = too_long > config.rollout.drop_budget and comes_to_all
    return too_long == prompts.rows or (key == "data.path" and spends_budget)


def _tokens(environment: Environment, prompt: Prompt) -> tuple[tuple[int, ...], int]:
    """Return the tokens of a row, and the fewest that have to fit behind them."""
    if isinstance(environment, Demonstrations):
        made = environment.demonstrate(prompt)
        return made.prompt_ids + made.response_ids, 0
    encoded = environment.encode(prompt)
    return encoded.token_ids if isinstance(encoded, EncodedPrompt) else encoded, 1
