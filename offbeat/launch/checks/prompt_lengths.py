"""Checks the number of prompt tokens, from the longest rows of the files downwards."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from offbeat.config.run import RunConfig
from offbeat.environments.demonstrations import Demonstrations
from offbeat.environments.factory import make_environment, make_evaluation_sets, make_prompts
from offbeat.environments.hub_files import NO_COMMITS
from offbeat.environments.inputs import eval_key
from offbeat.environments.media_prompts import find_media
from offbeat.environments.prompt_files import FilePrompts
from offbeat.environments.protocol import EncodedPrompt, Environment
from offbeat.environments.text import begun_answer
from offbeat.environments.tokenizer import load_tokenizer
from offbeat.messages.failures import OffbeatError
from offbeat.messages.finding import Finding, error, ok, warning
from offbeat.messages.groups import Prompt
from offbeat.messages.text import first_line
from offbeat.models.media_rules import MediaTokens, media_tokens

_LONGEST_ROWS: Final = 200
_WITHIN_S: Final = 2.0  # per file
_ROWS_THAT_FIT: Final = 50
"""Tokenising ends once this many rows in a row leave room for a response."""
_LISTED_RANGES: Final = 40  # of row numbers in a message


@dataclass(frozen=True, slots=True)
class _Texts:
    """Encoder of rows, and the tokens that rows should not contain."""

    environment: Environment
    unknown: int | None
    first: int | None  # token that may begin a text only once
    vocabulary: int  # rows of the model's embeddings
    is_too_large: bool  # whether the tokenizer has tokens beyond them
    media_tokens: MediaTokens


def check_prompt_lengths(
    config: RunConfig, commits: Mapping[str, str] = NO_COMMITS
) -> Iterator[Finding]:
    """Tokenise the longest rows of the prompt files, without running code of custom environments.

    ``MediaPlugin.check_media`` checks rows with media. ``commits`` are by path on the hub.
    """
    if config.environment.name not in {"function", "gsm8k", "demonstrations"}:
        return
    from transformers import AutoConfig

    path, trust = config.model.path, config.model.trust_remote_code
    try:
        tokenizer = load_tokenizer(config)
        model = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust)
        tokens = media_tokens(path, tokenizer, trust_remote_code=trust)
        environment = make_environment(config.environment, tokenizer, Path.cwd())
        sets = {
            eval_key(name): each for name, each in make_evaluation_sets(config, commits).items()
        }
        files = {"data.path": make_prompts(config, commits), **sets}
    except (OSError, ValueError, OffbeatError):
        return  # reported by the checks of the model, the files and the target
    vocabulary = int(model.get_text_config().vocab_size)
    texts = _Texts(
        environment,
        unknown=getattr(tokenizer, "unk_token_id", None),
        first=getattr(tokenizer, "bos_token_id", None),
        vocabulary=vocabulary,
        is_too_large=len(tokenizer) > vocabulary,
        media_tokens=tokens,
    )
    for key, prompts in files.items():
        if isinstance(prompts, FilePrompts) and (key == "data.path" or key in config.eval.paths):
            yield from _longest(config, key, prompts, texts)


@dataclass(slots=True)
class Refusals:
    """Rows that cannot become a prompt, by kind of error."""

    kinds: dict[str, list[tuple[int, str]]] = field(
        default_factory=dict[str, list[tuple[int, str]]]
    )

    def add(self, row: int, kind: str, problem: str) -> None:
        self.kinds.setdefault(kind, []).append((row, problem))

    @property
    def count(self) -> int:
        return sum(map(len, self.kinds.values()))

    def __str__(self) -> str:
        return "; ".join(
            f"{len(rows)} {kind} (row {rows[0][0]}: {rows[0][1]})"
            for kind, rows in self.kinds.items()
        )


@dataclass(slots=True)
class _Measured:
    """Measures of the longest rows of a file."""

    rows: int = 0
    longest: int = 0  # tokens
    longest_with_room: int = 0  # tokens, of rows after which a token fits
    too_long: list[int] = field(default_factory=list[int])  # rows
    cut_short: list[int] = field(default_factory=list[int])  # no room for max_new_tokens
    lossy: list[int] = field(default_factory=list[int])
    begun_twice: list[int] = field(default_factory=list[int])
    begun_answers: list[int] = field(default_factory=list[int])
    beyond: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # with the token
    with_media_token: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    refused: Refusals = field(default_factory=Refusals)
    last_long: int = 0  # number of rows up to the last one that is too long or cut short
    is_unfinished: bool = False  # the time was up before a long row was the last one

    def compare_length(self, row: int, limit: int, tokens: int, *, least: int, most: int) -> None:
        """Count a row. Its response needs at ``least`` and may have at ``most`` so many tokens."""
        if tokens + least > limit:
            self.too_long.append(row)
        else:
            self.longest_with_room = max(self.longest_with_room, tokens)
            self.cut_short += [row] if tokens + most > limit else []
        if tokens + max(least, most) > limit:
            self.last_long = self.rows

    @property
    def end_of_long_rows(self) -> str:
        """Note that rows were not tokenised although they may be long, too. May be empty."""
        is_open = self.is_unfinished and self.rows - self.last_long <= _ROWS_THAT_FIT
        return "; the time was too short for the others" if is_open else ""


def _draw_longest(prompts: FilePrompts, count: int) -> Iterator[Prompt]:
    """Yield all rows, longest first. Sort more than ``count`` rows only if more are requested."""
    yield from prompts.longest(count)
    yield from islice(prompts.longest(prompts.rows), count, None)


def list_rows(rows: Collection[int]) -> str:
    """Return row numbers as ranges, such as ``rows 3, 5 to 9 (counted from 0)``."""
    ranges = list[list[int]]()
    for row in sorted(rows):
        if ranges and row == ranges[-1][1] + 1:
            ranges[-1][1] = row
        else:
            ranges.append([row, row])
    shown = [
        str(first) if first == last else f"{first} to {last}"
        for first, last in ranges[:_LISTED_RANGES]
    ]
    left_out = sum(last - first + 1 for first, last in ranges[_LISTED_RANGES:])
    more = f" and {left_out} more" if left_out else ""
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(shown)}{more} (counted from 0)"


def _longest(config: RunConfig, key: str, prompts: FilePrompts, texts: _Texts) -> Iterator[Finding]:
    limit, give_up_at = config.generator.max_model_len, time.monotonic() + _WITHIN_S
    seen = _Measured()
    # A token beyond the embeddings may be in any row.
    most = prompts.rows if texts.is_too_large else _LONGEST_ROWS
    for prompt in _draw_longest(prompts, most):
        if seen.rows >= most and seen.rows - seen.last_long > _ROWS_THAT_FIT:
            break
        if time.monotonic() > give_up_at:
            seen.is_unfinished = seen.rows < prompts.rows
            break
        if find_media().names_media(prompt.data):
            continue
        try:
            tokens, least = _tokens(texts.environment, prompt)
        except Exception as broken:  # noqa: BLE001 - a chat template may raise anything
            seen.rows += 1
            seen.refused.add(prompt.row, type(broken).__name__, first_line(broken))
            continue
        seen.rows, seen.longest = seen.rows + 1, max(seen.longest, len(tokens))
        seen.beyond += [(prompt.row, id_) for id_ in tokens if id_ >= texts.vocabulary][:1]
        seen.begun_twice += [prompt.row] if [*tokens[:2]] == [texts.first] * 2 else []
        # Most rows of a data set for supervised fine-tuning end with the whole answer.
        if config.environment.name == "function" and begun_answer(prompt.data):
            seen.begun_answers.append(prompt.row)
        # A demonstration includes its response.
        new = config.generator.sampling.max_new_tokens if least else 0
        seen.compare_length(prompt.row, limit, len(tokens), least=least, most=new)
        seen.lossy += [prompt.row] if texts.unknown in tokens else []
        if problem := texts.media_tokens.problem_of_text(tokens):
            seen.with_media_token.append((prompt.row, problem))
    if seen.rows:
        yield from _findings(config, key, prompts, seen)
        yield from _token_findings(seen, texts, _summary(key, prompts, seen))


def _findings(
    config: RunConfig, key: str, prompts: FilePrompts, seen: _Measured
) -> Iterator[Finding]:
    summary = _summary(key, prompts, seen)
    if seen.refused.count:
        read = f"the {seen.rows} longest of {prompts.rows} rows in {key}"
        message = f"{seen.refused.count} of {read} cannot be tokenised: {seen.refused}"
        finding = error if ends_run(config, key, prompts.rows, seen.refused.count) else warning
        yield finding("prompts", message, "Fix the rows, or the model's chat template.")
    if too_long := seen.too_long:
        message = (
            f"{summary}: {len(too_long)} leave no room in generator.max_model_len="
            f"{config.generator.max_model_len}, the longest has {seen.longest} tokens; "
            f"{list_rows(too_long)}{seen.end_of_long_rows}"
        )
        fix = "Remove them, or raise generator.max_model_len: they fail their group."
        finding = error if ends_run(config, key, prompts.rows, len(too_long)) else warning
        yield finding("prompts", message, fix)
    if seen.cut_short:
        yield _find_cut_responses(config, seen, summary)
    if seen.longest and not (seen.too_long or seen.cut_short):
        yield ok("prompts", f"{summary}: {seen.longest} tokens at most")
    if seen.with_media_token:
        row, problem = seen.with_media_token[0]
        bad = len(seen.with_media_token)
        message = f"{summary}: {bad} cannot be used, the first is row {row}: it {problem}"
        finding = error if ends_run(config, key, prompts.rows, bad) else warning
        yield finding("prompts", message, "Remove them: they fail their group.")
    if lossy := seen.lossy:
        message = (
            f"{summary}: {len(lossy)} have text that the tokenizer of model.path does not know, the "
            f"first is row {lossy[0]}; the model reads its unknown token there"
        )
        yield warning("prompts", message, "Write the rows in the tokenizer's characters.")


def _find_cut_responses(config: RunConfig, seen: _Measured, summary: str) -> Finding:
    limit, new = config.generator.max_model_len, config.generator.sampling.max_new_tokens
    needed = seen.longest_with_room + new
    message = (
        f"{summary}: {len(seen.cut_short)} leave less room than generator.sampling.max_new_tokens={new} "
        f"in generator.max_model_len={limit}, the longest has {seen.longest_with_room} tokens; "
        f"their responses are cut short: {list_rows(seen.cut_short)}{seen.end_of_long_rows}"
    )
    fix = (
        f"Set generator.max_model_len to {needed} (prompt and response share it), lower "
        "max_new_tokens, or take the rows out."
    )
    return warning("prompts", message, fix)


def _token_findings(seen: _Measured, texts: _Texts, summary: str) -> Iterator[Finding]:
    if seen.beyond:
        row, token = seen.beyond[0]
        message = (
            f"{summary}: {len(seen.beyond)} have tokens for which the model has no embedding, the "
            f"first is row {row}: token {token}, but config.json has vocab_size={texts.vocabulary}"
        )
        fix = (
            "Resize the embeddings of the model to its tokenizer, or remove the text from the rows."
        )
        yield error("prompts", message, fix)
    if begun := seen.begun_answers:
        message = (
            f"{summary}: {len(begun)} end with a message of the assistant, which the model "
            f"continues; the first is row {begun[0]}"
        )
        fix = "If it is the whole answer, remove it: the model would see it. Otherwise leave it."
        yield warning("prompts", message, fix)
    if twice := seen.begun_twice:
        message = (
            f"{summary}: {len(twice)} begin with two tokens {texts.first}, which begins a text; the "
            f"first is row {twice[0]}"
        )
        fix = "Remove the text of that token from the rows: the tokenizer adds it."
        yield warning("prompts", message, fix)


def _summary(key: str, prompts: FilePrompts, seen: _Measured) -> str:
    return f"the {seen.rows} longest of {prompts.rows} rows in {key} were tokenised"


def ends_run(config: RunConfig, key: str, rows: int, bad: int) -> bool:
    """Return whether a run over these rows must end because it has to drop too many groups."""
    comes_to_all = config.steps * config.groups_per_step >= rows
    spends_budget = bad > config.rollout.drop_budget and comes_to_all
    return bad == rows or (key == "data.path" and spends_budget)


def _tokens(environment: Environment, prompt: Prompt) -> tuple[tuple[int, ...], int]:
    """Return the tokens of a row, and how many more tokens must at least fit after them."""
    if isinstance(environment, Demonstrations):
        made = environment.demonstrate(prompt)
        return made.prompt_ids + made.response_ids, 0
    encoded = environment.encode(prompt)
    return encoded.token_ids if isinstance(encoded, EncodedPrompt) else encoded, 1
