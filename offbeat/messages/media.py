"""Media of a prompt: arrays that all samples of its group share, next to the tokens.

The core stores, sends and counts media, but never reads them. The plug-in that makes them defines
names, shapes and meaning.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray


MEDIA_PREFIX: Final = "media_"
"""Prefix of the name of every media column."""

Media = Mapping[str, "NDArray[Any]"]
"""Media of one prompt, by column name. The prompt's token ids already contain the placeholders."""


class Thumbnail(NamedTuple):
    """Small image of a medium, at most 96 pixels a side, for people who look at a run."""

    height: int
    width: int
    rgb: bytes  # height * width * 3, row by row


def get_media(columns: Mapping[str, "NDArray[Any]"]) -> Media | None:
    """Return the media of a group's columns, or None if its prompt has none."""
    return {k: v for k, v in columns.items() if k.startswith(MEDIA_PREFIX)} or None


def media_bytes(media: Media | None) -> int:
    """Return the bytes that media need in their group's columns."""
    return sum(values.nbytes for values in (media or {}).values())


class NoMedia:
    """Stand-in for a missing media plug-in. With it, no recipe can request media."""

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
