"""Errors of pictures in prompts, and of models that cannot read pictures."""

from typing import Final

from offbeat.environments.media_prompts import MediaError
from offbeat.messages.failures import OffbeatError

PLACE: Final = "<image>"
"""Placeholder of a picture in a row, the same for every model's token."""


STRAY_TOKEN: Final = "picture_token"  # noqa: S105 - no password
"""Failure reason: a text has a token that represents a picture."""

UNUSABLE: Final = "picture_unusable"
"""Failure reason: a picture cannot be read, decoded or placed, or is too large."""


class BadPicture(MediaError):
    """A picture of a prompt has an unusable file, content or size.

    Fix: repair or shrink the picture, or raise the limit in ``environment.images``.
    """

    picture: str
    problem: str

    @property
    def reason(self) -> str:
        return UNUSABLE

    def __str__(self) -> str:
        return f"picture {self.picture!r:.200} {self.problem}"


class NoPictures(OffbeatError):
    """The model cannot read pictures, or its processor cannot be loaded here.

    Fix: use a model with pictures, and run ``pip install 'offbeat[vision]'``.
    """

    path: str
    problem: str

    def __str__(self) -> str:
        return f"model.path={self.path}: {self.problem}"


class StrayPlaceholder(MediaError):
    """The text of a prompt has a picture token where no picture belongs.

    Fix: remove the picture token from the text (docs/images.md).
    """

    token: str

    @property
    def reason(self) -> str:
        return STRAY_TOKEN

    def __str__(self) -> str:
        return (
            f"the text has {self.token!r} where no picture belongs; the model would read it as part "
            f"of a picture: write {PLACE!r} for a picture, and leave the token out"
        )


class WrongPlaces(MediaError):
    """The text of a prompt does not have one place for each of its pictures.

    Fix: give the text one place per picture (docs/images.md).
    """

    places: int
    pictures: int

    @property
    def reason(self) -> str:
        return UNUSABLE

    def __str__(self) -> str:
        return (
            f"the prompt has {self.places} places for its {self.pictures} pictures: write "
            f"{PLACE!r} for each, or a part of type image in messages"
        )
