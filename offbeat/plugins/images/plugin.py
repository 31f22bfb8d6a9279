"""Plug-in of pictures, which implements ``environments.media_prompts.MediaPlugin``."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from offbeat.config.environment_traits import EnvironmentTraits
from offbeat.config.problems import Clash
from offbeat.environments.environment_plugin import PluginOfEnvironments
from offbeat.plugins.images.section import PICTURE_KEYS, ImagesConfig, images_section

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from offbeat.config.run import RunConfig
    from offbeat.config.sections.environment import EnvironmentConfig
    from offbeat.environments.built_in import Arithmetic
    from offbeat.environments.text import Tokenizer
    from offbeat.messages.finding import Finding
    from offbeat.messages.media import Media, Thumbnail
    from offbeat.models.media_rules import MediaRules, MediaTokens
    from offbeat.plugins.images.digits import DigitPrompts
    from offbeat.plugins.images.encoder import PictureEncoder
    from offbeat.plugins.images.logged_pictures import LoggedPictures

_READ_PICTURES: Final = ("function", "custom", "digits", "stub")
"""Environments whose prompts may have pictures."""


class Images:
    """Pictures in prompts."""

    key = "images"
    section = ImagesConfig
    doc = "Pictures in prompts, for a model that reads them. null: rows with pictures are refused."
    LIMIT_KEY: str = "environment.images.max_mib"
    PREVIEW_COLUMN: str = "pictures"
    ROW_KEYS: tuple[str, ...] = PICTURE_KEYS

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield a clash if pictures are configured for an environment without pictures."""
        name = config.environment.name
        if images_section(config.environment) is not None and name not in _READ_PICTURES:
            yield Clash(
                ("environment.images", "environment.name"),
                f"environment.images is not used: prompts of environment.name={name} have no "
                "pictures",
                f"Leave it out, or set environment.name to one of {', '.join(_READ_PICTURES)}.",
            )

    def rules(self, config: Any) -> "MediaRules | None":  # noqa: ANN401 -- transformers' config
        """Return the rules of a model, or None if it reads no pictures."""
        from offbeat.plugins.images.families import rules_of_config

        return rules_of_config(config)

    def tokens(
        self,
        path: str,
        tokenizer: Any,  # noqa: ANN401 -- of transformers
        *,
        trust_remote_code: bool,
    ) -> "MediaTokens":
        """Return the picture tokens of the model at ``path``.

        Raises:
            OSError: Its config cannot be read.
            ValueError: transformers does not support its model type.
        """
        from offbeat.plugins.images.model_tokens import picture_tokens

        return picture_tokens(path, tokenizer, trust_remote_code=trust_remote_code)

    def names_media(self, row: Mapping[str, object]) -> bool:
        """Return whether a row names pictures. A row with null or an empty list is text."""
        from offbeat.plugins.images.rows import names_pictures

        return names_pictures(row)

    def row_problem(self, config: "EnvironmentConfig", row: Mapping[str, object]) -> str | None:
        """Return the problem with a row's pictures, such as missing ones, or None."""
        from offbeat.plugins.images.rows import row_problem

        return row_problem(config, row)

    def without_content(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row with only the number of bytes in place of each picture's content."""
        from offbeat.plugins.images.rows import without_content

        return without_content(row)

    def stub_media(self, config: "EnvironmentConfig", row: int) -> "Media | None":
        """Return a picture of a dry run's prompt, or None if its prompts have no pictures."""
        from offbeat.plugins.images.digits import stub_media

        return stub_media(config, row)

    def encoder(self, config: "RunConfig") -> "PictureEncoder | None":
        """Load the model's image processor if prompts have pictures. A stub creates its own media.

        Raises:
            NoPictures: The model reads no pictures.
        """
        images, model = images_section(config.environment), config.model
        if images is None or config.environment.name == "stub":
            return None
        from offbeat.plugins.images.encoder import PictureEncoder
        from offbeat.plugins.images.processors import load_processor

        processor = load_processor(model.path, trust_remote_code=model.trust_remote_code)
        return PictureEncoder(images, processor)

    def check(self, media: "Media") -> None:
        """Check the arrays of pictures against each other."""
        from offbeat.plugins.images.pictures import Pictures

        Pictures.of(media)

    def previews(self, media: "Media | None") -> "tuple[Thumbnail, ...]":
        """Return small copies of the first pictures of a prompt."""
        from offbeat.plugins.images.thumbnails import thumbnails

        return tuple(thumbnails(media))

    def log_columns(self) -> Mapping[str, Any]:
        """Return the Arrow types of the picture columns of rollout files, by name."""
        from offbeat.plugins.images.thumbnails import log_columns

        return log_columns()

    def log_values(self, media: "Media | None") -> tuple[Mapping[str, Any], int]:
        """Return the values of these columns for a group, and the number of their bytes."""
        from offbeat.plugins.images.thumbnails import log_values

        return log_values(media)

    def read_logged(self, run_dir: Path, prompt_index: int) -> "list[LoggedPictures]":
        """Return the pictures of a group from the rollout files, by attempt."""
        from offbeat.plugins.images.logged_pictures import read_logged_pictures

        return read_logged_pictures(run_dir, prompt_index)

    def check_model(self, config: "RunConfig", model: "PreTrainedModel") -> "Iterator[Finding]":
        """Check that the model reads the pictures of the prompts."""
        from offbeat.plugins.images.prompt_check import check_model

        return check_model(config, model)

    def check_media(self, config: "RunConfig", commits: Mapping[str, str]) -> "Iterator[Finding]":
        """Encode pictures of the first rows like a worker."""
        from offbeat.plugins.images.prompt_check import check_pictures

        return check_pictures(config, commits)


class Digits(PluginOfEnvironments):
    """Environment that asks for the digit in a generated picture."""

    traits = EnvironmentTraits(
        "read a digit in a picture.",
        makes_prompts=True,
        held_out="digits of different pictures than those of training",
        listed_after="arithmetic",
    )

    def find_clashes(self, section: "EnvironmentConfig") -> Iterator[Clash]:
        """Yield pictures without their limits."""
        if images_section(section) is None:
            yield Clash(
                ("environment.images", "environment.name"),
                "environment.name=digits draws a picture for each prompt, but environment.images is "
                "not set",
                "Write `images: {max_mib: 0.02}` under environment.",
            )

    def make_prompts(
        self, config: "RunConfig", began_with: Mapping[str, str], working_dir: Path
    ) -> "DigitPrompts":
        """Return the prompts of training.

        Raises:
            BadEnvironment: The options have unknown keys or wrong types.
        """
        from offbeat.environments.factory import read_options
        from offbeat.plugins.images.digits import DigitPrompts, DigitsOptions

        del began_with, working_dir
        rows, data = read_options(config.environment, DigitsOptions).rows, config.data
        return DigitPrompts(rows, seed=config.seed, shuffle=data.shuffle, epochs=data.epochs)

    def make_held_out_prompts(self, config: "RunConfig") -> "DigitPrompts":
        """Return prompts with pictures that follow the training pictures.

        Raises:
            BadEnvironment: The options have unknown keys or wrong types.
        """
        from offbeat.environments.factory import read_options
        from offbeat.plugins.images.digits import DigitPrompts, DigitsOptions

        rows = read_options(config.environment, DigitsOptions).rows
        return DigitPrompts(rows, seed=config.seed, first=rows, shuffle=False, epochs=1)

    def make_environment(
        self, section: "EnvironmentConfig", tokenizer: "Tokenizer", working_dir: Path
    ) -> "Arithmetic":
        """Return the environment of one worker."""
        from offbeat.environments.built_in import Arithmetic

        del section, working_dir
        return Arithmetic(tokenizer)


MEDIA: Final = Images()
DIGITS: Final = Digits()
