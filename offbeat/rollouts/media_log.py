"""Columns of the rollout files about the media of a prompt."""

from collections.abc import Mapping
from typing import Any, Protocol, cast

from offbeat.doors import find_media
from offbeat.messages.media import Media, Thumbnail


class MediaLog(Protocol):
    """Columns of the rollout files that the option of media fills."""

    def log_columns(self) -> Mapping[str, Any]:
        """Return the Arrow type of each column by its name."""
        ...

    def log_values(self, media: Media | None) -> tuple[Mapping[str, Any], int]:
        """Return the value of each column for a group, and the bytes of all of them."""
        ...

    def previews(self, media: Media | None) -> tuple[Thumbnail, ...]:
        """Return small copies of the first media of a prompt."""
        ...


def media_log() -> MediaLog:
    """Return the registered option."""
    return cast("MediaLog", find_media())
