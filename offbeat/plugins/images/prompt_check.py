"""Checks that the model's processor can read the first rows, and fits the model's config."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers leaves its configs untyped.

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from offbeat.config.mixture import has_media
from offbeat.config.run import RunConfig
from offbeat.doors import is_installed
from offbeat.environments.factory import make_evaluation_sets, make_prompts
from offbeat.environments.hub_files import NO_COMMITS
from offbeat.environments.inputs import eval_key
from offbeat.environments.prompts import PromptSource
from offbeat.environments.protocol import EncodedPrompt, EnvironmentUnavailable
from offbeat.launch.checks.prompt_lengths import Refusals, ends_run
from offbeat.messages.failures import OffbeatError
from offbeat.messages.finding import Finding, Level, error, ok, warning
from offbeat.messages.groups import Prompt
from offbeat.messages.media import media_bytes
from offbeat.messages.text import first_line
from offbeat.models.media_rules import MediaTokens
from offbeat.plugins.images.encoder import PictureEncoder
from offbeat.plugins.images.errors import (
    PLACE,
    BadPicture,
    NoPictures,
    StrayPlaceholder,
    WrongPlaces,
)
from offbeat.plugins.images.families import READ_FAMILIES, rules_of_config
from offbeat.plugins.images.model_tokens import picture_tokens
from offbeat.plugins.images.rows import names_pictures
from offbeat.plugins.images.section import images_section
from offbeat.trainers.trainer_plugin import find_trainer

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedModel

    from offbeat.plugins.images.processors import PictureProcessor


_SUBJECT: Final = "pictures"
_ROWS: Final = 64
_WITHIN_S: Final = 3.0  # for each file
_SIDES: Final = ((640, 480), (300, 500), (64, 64))
"""Width and height of test pictures: a photo, an upright one, and one below most models' size."""


def check_processor(path: str, processor: "PictureProcessor", tokens: MediaTokens) -> Finding:
    """Run the processor on test pictures, and check the result by the rules of the model's config.

    Processor and config disagree if one directory has files of two models with different picture
    sizes, patch sizes or numbers of tokens per picture.
    """
    made = list[str]()
    for width, height in _SIDES:
        shown = f"{width} x {height} pixels"
        try:
            encoded = processor.encode(PLACE, [_gradient(width, height)])
        except Exception as raised:  # noqa: BLE001 - the model's files may contain anything
            seen = (
                f"the image processor of model.path={path} raised {type(raised).__name__} on a "
                f"picture of {shown}: {first_line(raised)}"
            )
            return error(_SUBJECT, seen, "Restore the files of the model's processor.")
        if problem := tokens.problem_of_prompt(encoded.token_ids, encoded.media):
            seen = (
                f"the image processor of model.path={path} does not fit its config.json: a prompt "
                f"with a picture of {shown} {problem}"
            )
            fix = "Take both from one model: preprocessor_config.json, processor_config.json, config.json."
            return error(_SUBJECT, seen, fix)
        made.append(f"{len(encoded.token_ids)} of {width} x {height}")
    return ok(
        _SUBJECT,
        f"the processor fits the model's config; tokens with a picture: {', '.join(made)}",
    )


def _gradient(width: int, height: int) -> "Image":
    from PIL import Image  # noqa: PLC0415 -- of an extra

    across, down = Image.linear_gradient("L").rotate(90), Image.linear_gradient("L")
    whole = Image.merge("RGB", (across, down, down.rotate(180)))
    return whole.resize((width, height))


def check_pictures(config: RunConfig, commits: Mapping[str, str] = NO_COMMITS) -> Iterator[Finding]:
    """Run the model's processor on test pictures, then on the first rows like a worker.

    Rows are read, decoded, resized, and placed in the prompt. ``commits`` has the commits of paths
    on the hub.
    """
    images = images_section(config.environment)
    if images is None or config.environment.name == "stub":
        return
    if not is_installed("PIL"):
        yield error(_SUBJECT, "Pillow is not installed", "pip install 'offbeat[vision]'")
        return
    # Needs transformers and Pillow.
    from offbeat.plugins.images.processors import load_processor  # noqa: PLC0415 -- loads transformers

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
    yield (fits := check_processor(model.path, processor, tokens))
    if fits.level is Level.ERROR:
        return
    try:
        sets = make_evaluation_sets(config, commits)
        sources = {"data.path": make_prompts(config, commits)}
        sources |= {eval_key(name): each for name, each in sets.items()}
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
        encoded = _try_encode(encoder, tokens, prompt)
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
    images = images_section(config.environment)
    most = 0.0 if images is None else images.max_mib
    yield ok(
        _SUBJECT,
        f"prompts of {key} encoded with their pictures: {rows}; {most_tokens} tokens and "
        f"{most_bytes / 2**20:.3g} MiB at most, of environment.images.max_mib={most:g}",
    )


def _try_encode(
    encoder: PictureEncoder, tokens: MediaTokens, prompt: Prompt
) -> EncodedPrompt | tuple[str, str]:
    """Encode a prompt with its pictures, or return the kind and text of the problem."""
    try:
        encoded = encoder.encode_now(prompt)
    except (BadPicture, WrongPlaces, StrayPlaceholder, EnvironmentUnavailable) as bad:
        return type(bad).__name__, str(bad)
    except Exception as raised:  # noqa: BLE001 - a chat template or a processor may raise anything
        return type(raised).__name__, f"raised by the model's processor: {first_line(raised)}"
    problem = tokens.problem_of_prompt(encoded.token_ids, encoded.media)
    return ("misplaced", problem) if problem else encoded


_MODEL_CHECK_SUBJECT: Final = "vision tower"


def check_model(config: RunConfig, model: "PreTrainedModel") -> Iterator[Finding]:
    """Check that a model without memory reads the pictures of the prompts."""
    if not has_media(config):
        return
    kind: str = model.config.model_type
    plugin = find_trainer(config.trainer.backend)
    if (rules := rules_of_config(model.config)) is None:
        seen = f"{type(model).__name__} ({kind}): its pictures are not supported"
        families: Sequence[str] = READ_FAMILIES
        if plugin is not None:
            trained = plugin.picture_families()
            families = [each for each in families if each in trained]
        yield error(_MODEL_CHECK_SUBJECT, seen, f"Take a model of {', '.join(families)}.")
    else:
        proof = "proved at the start"
        if plugin is not None:
            proof = "compared with the engine's by canaries (sync.canary_interval)"
        yield ok(_MODEL_CHECK_SUBJECT, f"{type(model).__name__} reads {rules.kind.value}; {proof}")
