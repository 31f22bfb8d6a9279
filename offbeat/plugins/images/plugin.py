"""Everything that the core asks of pictures, by the protocols of the rooms that ask.

``models.media_rules``, ``models.media_tokens``, ``environments.media_prompts``,
``rollouts.media_log``, ``telemetry.preview_column`` and ``launch.checks.media`` declare them. Modules
that load a large library are imported when they are called.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from offbeat.config.run import RunConfig
from offbeat.environments.prompts import PromptSource
from offbeat.messages.media import Media, Thumbnail
from offbeat.plugins.images.digits import DigitPrompts
from offbeat.plugins.images.encoder import PictureEncoder
from offbeat.plugins.images.families import rules_of_config
from offbeat.plugins.images.model_tokens import picture_tokens
from offbeat.plugins.images.pictures import Pictures
from offbeat.plugins.images.rows import (
    PICTURE_KEYS,
    names_pictures,
    pictures_of,
    row_problem,
    shown,
    without_content,
)
from offbeat.plugins.images.stub import stub_media
from offbeat.plugins.images.thumbnails import thumbnails

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from offbeat.messages.finding import Finding

__all__ = ["row_problem", "stub_media", "without_content"]

PREVIEW_COLUMN: Final = "pictures"
ROW_KEYS: tuple[str, ...] = PICTURE_KEYS

rules = rules_of_config
tokens = picture_tokens
names_media = names_pictures


def check(media: Media) -> None:
    """Check the arrays of pictures against each other."""
    Pictures.of(media)


def names_in(row: Mapping[str, Any]) -> list[str]:
    """Return the pictures that a row names, each in a form to be shown."""
    named: object = pictures_of(row)
    return [shown(each) for each in cast("list[Any]", named)] if isinstance(named, list) else []


def digits(
    rows: int, seed: int, epochs: int | None, *, shuffle: bool, held_out: bool
) -> PromptSource:
    """Return the prompts of ``environment.name=digits``; held-out ones follow the others."""
    first = rows if held_out else 0
    return DigitPrompts(rows, seed=seed, first=first, shuffle=shuffle, epochs=epochs)


def encoder(config: RunConfig) -> PictureEncoder | None:
    """Load the model's image processor if prompts have pictures; a stub makes its own.

    Raises:
        NoPictures: The model reads none.
    """
    images = config.environment.images
    if images is None or config.environment.name == "stub":
        return None
    from offbeat.plugins.images.processors import load_processor

    model = config.model
    processor = load_processor(model.path, trust_remote_code=model.trust_remote_code)
    return PictureEncoder(images, processor)


def previews(media: Media | None) -> tuple[Thumbnail, ...]:
    """Return small copies of the first pictures of a prompt."""
    return tuple(thumbnails(media))


def log_columns() -> Mapping[str, Any]:
    """Return the Arrow type of each column of the rollout files by its name."""
    from offbeat.plugins.images.log_columns import log_columns

    return log_columns()


def log_values(media: Media | None) -> tuple[Mapping[str, Any], int]:
    """Return the value of each of these columns for a group, and the bytes of all of them."""
    from offbeat.plugins.images.log_columns import log_values

    return log_values(media)


def check_model(config: RunConfig, model: "PreTrainedModel") -> "Iterator[Finding]":
    """Check that the model reads the pictures of the prompts."""
    from offbeat.plugins.images.prompt_check import check_model

    return check_model(config, model)


def check_media(config: RunConfig, commits: Mapping[str, str]) -> "Iterator[Finding]":
    """Encode pictures of the first rows as a worker does."""
    from offbeat.plugins.images.prompt_check import check_pictures

    return check_pictures(config, commits)
