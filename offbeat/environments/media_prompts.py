"""Defines the interface of the registered option that reads and encodes media of prompts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.doors import find_media
from offbeat.environments.protocol import EncodedPrompt
from offbeat.messages.failures import OffbeatError
from offbeat.messages.groups import Prompt
from offbeat.messages.media import Media

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig


class MediaError(OffbeatError):
    """Base of the errors of media in prompts; ``reason`` is the reason of the group's failure."""

    @property
    def reason(self) -> str:
        raise NotImplementedError


class MediaEncoder(Protocol):
    """Encodes prompts that name media, instead of their environment."""

    async def encode(self, prompt: Prompt) -> EncodedPrompt | None:
        """Return the first observation of a prompt that names media, or None if it names none.

        Raises:
            MediaError: The media cannot be used.
            EnvironmentUnavailable: The file system could not be read.
        """
        ...

    def close(self) -> None:
        """Stop the encoder once it is idle."""
        ...


class MediaPrompts(Protocol):
    """Reads the media that rows name."""

    ROW_KEYS: tuple[str, ...]
    """Keys of a row that name media; a Parquet file may have bytes there."""

    LIMIT_KEY: str
    """Key of the recipe that limits the bytes of a prompt."""

    def names_media(self, row: Mapping[str, object]) -> bool:
        """Return whether a row names media."""
        ...

    def row_problem(self, config: EnvironmentConfig, row: Mapping[str, object]) -> str | None:
        """Return the problem with a row's media, such as missing ones, or None if there is none."""
        ...

    def without_content(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row for display as text: bytes are replaced by their number."""
        ...

    def stub_media(self, config: EnvironmentConfig, row: int) -> Media | None:
        """Return the media of a dry run's prompt, or None if its prompts have none."""
        ...

    def encoder(self, config: "RunConfig") -> MediaEncoder | None:
        """Return the encoder of a worker, or None if prompts have no media.

        Raises:
            OffbeatError: The model reads no media.
        """
        ...

    def check(self, media: Media) -> None:
        """Check that the arrays of media agree with each other.

        Raises:
            SchemaError: Names the first array at fault.
        """
        ...


def media_prompts() -> MediaPrompts:
    """Return the registered option."""
    return cast("MediaPrompts", find_media())
