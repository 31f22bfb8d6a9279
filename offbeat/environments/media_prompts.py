"""Interface of the plug-in that reads and encodes media of prompts."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from offbeat import doors
from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.environments.protocol import EncodedPrompt
from offbeat.messages.failures import OffbeatError
from offbeat.messages.finding import Finding
from offbeat.messages.groups import Prompt
from offbeat.messages.media import Media, Thumbnail

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig


class MediaError(OffbeatError):
    """Base of the errors about media in prompts. ``reason`` is why the group failed."""

    @property
    def reason(self) -> str:
        raise NotImplementedError


class MediaEncoder(Protocol):
    """Encodes prompts that name media, in place of their environment."""

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


class MediaPlugin(Protocol):
    """Media in prompts. ``NoMedia`` stands in if the plug-in is missing."""

    ROW_KEYS: tuple[str, ...]
    """Keys of a row that name media; a Parquet file may have bytes there."""

    LIMIT_KEY: str
    """Key of the recipe that limits the bytes of a prompt."""

    PREVIEW_COLUMN: str
    """Column of the run's files with small copies of a prompt's media."""

    def rules(self, config: Any) -> Any:  # noqa: ANN401 -- transformers' config
        """Return the ``MediaRules`` of a model, or None if it reads no media."""
        ...

    def tokens(self, path: str, tokenizer: Any, *, trust_remote_code: bool) -> Any:  # noqa: ANN401 -- of transformers
        """Return the ``MediaTokens`` of the model at ``path``, or None if it has none.

        Raises:
            OSError: The config cannot be read.
            ValueError: transformers does not know its model type.
        """
        ...

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
            SchemaError: They do not. The error names the first array at fault.
        """
        ...

    def previews(self, media: Media | None) -> tuple[Thumbnail, ...]:
        """Return small copies of the first media of a prompt."""
        ...

    def log_columns(self) -> Mapping[str, Any]:
        """Return the Arrow types, by name, of the columns that it fills in the rollout files."""
        ...

    def log_values(self, media: Media | None) -> tuple[Mapping[str, Any], int]:
        """Return a group's value for each of these columns, and their total bytes."""
        ...

    def read_logged(self, run_dir: Path, prompt_index: int) -> list[Any]:
        """Return the media of a group in the rollout files, each as a line of text and JSON."""
        ...

    def check_model(self, config: "RunConfig", model: Any) -> Iterable[Finding]:  # noqa: ANN401 -- of transformers
        """Check that the model, made without memory, can read the media of the prompts."""
        ...

    def check_media(self, config: "RunConfig", commits: Mapping[str, str]) -> Iterable[Finding]:
        """Encode media of the first rows as a worker does.

        ``commits`` maps each hub path to its commit.
        """
        ...


def find_media() -> MediaPlugin:
    """Return the plug-in of media, or ``NoMedia`` if it is missing.

    Raises:
        PluginUnusable: The import of the plug-in fails.
    """
    return doors.find_media()
