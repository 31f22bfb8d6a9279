"""Stands in for the media plug-in if none is installed: prompts have no media."""

from collections.abc import Mapping
from typing import Any, ClassVar

from offbeat.messages.media import Media, Thumbnail


class NoMedia:
    """Has the methods of a media plug-in. No recipe can request media."""

    LIMIT_KEY: ClassVar[str] = "an installation without a plug-in of media"
    PREVIEW_COLUMN: ClassVar[str] = "media"
    ROW_KEYS: ClassVar[tuple[str, ...]] = ()

    def rules(self, config: Any) -> None:  # noqa: ANN401 -- transformers' config
        """Return no rules: all models are read as text models."""
        del config

    def tokens(self, *_: object, **__: object) -> None:
        """Return None: all tokens are text."""

    def names_media(self, row: Mapping[str, object]) -> bool:
        del row
        return False

    def row_problem(self, config: Any, row: Mapping[str, object]) -> None:  # noqa: ANN401 -- of a room above
        del config, row

    def without_content(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return dict(row)

    def stub_media(self, *_: object) -> None:
        """Return None: prompts have no media."""

    def encoder(self, *_: object) -> None:
        """Return None: prompts have no media."""

    def check(self, media: Media) -> None:
        del media

    def previews(self, media: Media | None) -> tuple[Thumbnail, ...]:
        del media
        return ()

    def log_columns(self) -> Mapping[str, Any]:
        return {}

    def log_values(self, media: Media | None) -> tuple[Mapping[str, Any], int]:
        del media
        return {}, 0

    def read_logged(self, *_: object) -> list[object]:
        return []

    def check_model(self, *_: object) -> tuple[()]:
        return ()

    def check_media(self, *_: object) -> tuple[()]:
        return ()
