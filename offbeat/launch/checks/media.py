"""Checks that the media option provides."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, cast

from offbeat.config.run import RunConfig
from offbeat.doors import find_media
from offbeat.messages.finding import Finding

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MediaChecks(Protocol):
    """Checks of a run with possible media in prompts. Without media each yields nothing."""

    def check_model(self, config: RunConfig, model: "PreTrainedModel") -> Iterator[Finding]:
        """Check that the model, made without memory, can read the media of the prompts."""
        ...

    def check_media(self, config: RunConfig, commits: Mapping[str, str]) -> Iterator[Finding]:
        """Encode media of the first rows as a worker does.

        ``commits`` maps each hub path to its commit.
        """
        ...


def media_checks() -> MediaChecks:
    """Return the checks of the registered option."""
    return cast("MediaChecks", find_media())
