"""Checks that the model's processor reads the pictures of the prompts, on their first rows."""

import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Final

from offbeat.config.run import RunConfig
from offbeat.environments.factory import make_evaluation_sets, make_prompts
from offbeat.environments.hub_files import NO_COMMITS
from offbeat.environments.inputs import eval_key
from offbeat.environments.prompts import PromptSource
from offbeat.environments.protocol import EncodedPrompt
from offbeat.environments.unavailable import EnvironmentUnavailable
from offbeat.images.encoder import PictureEncoder
from offbeat.images.errors import (
    BadPicture,
    NoPictures,
    StrayPlaceholder,
    WrongPlaces,
)
from offbeat.images.model_tokens import picture_tokens
from offbeat.images.processor_check import check_processor
from offbeat.images.rows import names_pictures
from offbeat.launch.checks.finding import Finding, Level, error, ok, warning
from offbeat.launch.checks.prompt_lengths import Refusals, ends_run
from offbeat.messages.failures import OffbeatError
from offbeat.messages.groups import Prompt
from offbeat.messages.media import media_bytes
from offbeat.messages.text import first_line
from offbeat.multimodal.prompt_tokens import MediaTokens

_ROWS: Final = 64
_WITHIN_S: Final = 3.0  # for each file
_SUBJECT: Final = "pictures"


def check_pictures(config: RunConfig, commits: Mapping[str, str] = NO_COMMITS) -> Iterator[Finding]:
    """Run the model's processor on pictures of its own, then on the first rows as a worker does.

    Rows are read, decoded, resized, and placed in the prompt. ``commits`` are those of paths on the
    hub.
    """
    images = config.environment.images
    if images is None or config.environment.name == "stub":
        return
    if find_spec("PIL") is None:
        yield error(_SUBJECT, "Pillow is not installed", "pip install 'offbeat[vision]'")
        return
    # Of transformers and Pillow.
    from offbeat.images.processors import load_processor  # noqa: PLC0415 -- loads transformers

    model = config.model
    try:
        processor = load_processor(model.path, trust_remote_code=model.trust_remote_code)
        tokens = picture_tokens(
            model.path, processor.tokenizer, trust_remote_code=model.trust_remote_code
        )
    except NoPictures as blind:
        yield error(_SUBJECT, str(blind), "Name a model that reads pictures, with its processor.")
        return
    except (OSError, ValueError):
        return  # reported by the checks of the model
    about = list(check_processor(model.path, processor, tokens))
    yield from about
    if any(each.level is Level.ERROR for each in about):
        return
    try:
        sources: dict[str, PromptSource] = {"data.path": make_prompts(config, commits)}
        for name, each in make_evaluation_sets(config, commits).items():
            sources[eval_key(name)] = each
    except OffbeatError:
        return  # reported by the check of the prompts
    encoder = PictureEncoder(images, processor)
    for key, source in sources.items():
        yield from _of_source(config, encoder, tokens, key, source)
    encoder.close()


def _of_source(
    config: RunConfig,
    encoder: PictureEncoder,
    tokens: MediaTokens,
    key: str,
    source: PromptSource,
) -> Iterator[Finding]:
    limit, give_up_at = config.generator.max_model_len, time.monotonic() + _WITHIN_S
    most_tokens, most_bytes, rows, refused = 0, 0, 0, Refusals()
    for index in range(min(_ROWS, source.rows)):
        prompt = source.prompt(index)
        if prompt is None or time.monotonic() > give_up_at:
            break
        if not names_pictures(prompt.data):
            continue
        encoded = _encoded(encoder, tokens, prompt)
        if isinstance(encoded, tuple):
            refused.add(prompt.row, *encoded)
            continue
        if len(encoded.token_ids) >= limit:
            problem = (
                f"{len(encoded.token_ids)} tokens with its pictures leave no room in "
                f"generator.max_model_len={limit}"
            )
            refused.add(prompt.row, "too long", problem)
            continue
        rows += 1
        most_tokens = max(most_tokens, len(encoded.token_ids))
        if encoded.media is not None:
            most_bytes = max(most_bytes, media_bytes(encoded.media))
    if refused.count:
        fix = "Fix the rows or their files; a run drops their groups, within rollout.drop_budget."
        finding = error if ends_run(config, key, source.rows, refused.count) else warning
        yield finding(_SUBJECT, f"{refused.count} rows of {key} cannot be used: {refused}", fix)
    if refused.count and not rows:
        return
    images = config.environment.images
    most = 0.0 if images is None else images.max_mib
    yield ok(
        _SUBJECT,
        f"prompts of {key} encoded with their pictures: {rows}; {most_tokens} tokens and "
        f"{most_bytes / 2**20:.3g} MiB at most, of environment.images.max_mib={most:g}",
    )


def _encoded(
    encoder: PictureEncoder, tokens: MediaTokens, prompt: Prompt
) -> EncodedPrompt | tuple[str, str]:
    """Encode a prompt with its pictures, or return the kind of the problem and the problem."""
    try:
        encoded = encoder.encoded(prompt)
    except (BadPicture, WrongPlaces, StrayPlaceholder, EnvironmentUnavailable) as bad:
        return type(bad).__name__, str(bad)
    except Exception as raised:  # noqa: BLE001 - a chat template or a processor may raise anything
        return type(raised).__name__, f"raised by the model's processor: {first_line(raised)}"
    problem = tokens.problem_of_prompt(encoded.token_ids, encoded.media)
    return ("misplaced", problem) if problem else encoded
