"""Answers for prompts without media, where no plug-in of media is installed."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final, NoReturn

from offbeat.messages.failures import FixableError
from offbeat.messages.media import Media, Thumbnail

_FIX: Final = "Reinstall offbeat, or leave out environment.images"


class NoMediaPlugin(FixableError):
    """A recipe asks for media, and no plug-in reads any."""


class NoMedia:
    """Has the methods of a plug-in of media; a recipe that asks for media is refused."""

    PREVIEW_COLUMN: ClassVar[str] = "media"
    ROW_KEYS: ClassVar[tuple[str, ...]] = ()

    def rules(self, config: Any) -> None:  # noqa: ANN401 -- transformers' config
        """Return no rules: all models are read as models of text."""
        del config

    def tokens(self, *_: object, **__: object) -> None:
        """Return none: all tokens are of text."""

    def names_media(self, row: Mapping[str, object]) -> bool:
        del row
        return False

    def names_in(self, row: Mapping[str, Any]) -> list[str]:
        del row
        return []

    def row_problem(self, config: Any, row: Mapping[str, object]) -> None:  # noqa: ANN401 -- of a room above
        del config, row

    def without_content(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return dict(row)

    def stub_media(self, config: Any, row: int) -> None:  # noqa: ANN401 -- as above
        """Return none.

        Raises:
            NoMediaPlugin: The recipe asks for media.
        """
        del row
        if config.images is not None:
            _refuse("environment.images")

    def encoder(self, config: Any) -> None:  # noqa: ANN401 -- as above
        """Return none.

        Raises:
            NoMediaPlugin: The recipe asks for media.
        """
        if config.environment.images is not None:
            _refuse("environment.images")

    def digits(self, *_: object, **__: object) -> NoReturn:
        """Raise: this environment has pictures.

        Raises:
            NoMediaPlugin: Always.
        """
        _refuse("environment.name=digits")

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

    def check_model(self, *_: object) -> tuple[()]:
        return ()

    def check_media(self, *_: object) -> tuple[()]:
        return ()


def _refuse(subject: str) -> NoReturn:
    raise NoMediaPlugin(subject, "no plug-in that reads media is installed", _FIX)
