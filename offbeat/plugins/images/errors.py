"""Errors of pictures in prompts, and of models that cannot read them."""

from typing import Final

from offbeat.environments.media_prompts import MediaError
from offbeat.messages.failures import OffbeatError

PLACE: Final = "<image>"
"""Stands in a row for a picture, whatever token the model has for it."""


STRAY_TOKEN: Final = "picture_token"  # noqa: S105 - no password
"""Reason of a failure: a text has a token that represents a picture."""

UNUSABLE: Final = "picture_unusable"
"""Reason of a failure: a picture cannot be read, decoded or placed, or is too large."""


class BadPicture(MediaError):
    """A picture of a prompt cannot be used: its file, its content or its size."""

    picture: str
    problem: str

    @property
    def reason(self) -> str:
        return UNUSABLE

    def __str__(self) -> str:
        return f"picture {self.picture!r:.200} {self.problem}"


class NoPictures(OffbeatError):
    """A model cannot read pictures, or its processor cannot be loaded here."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"model.path={self.path}: {self.problem}"


class StrayPlaceholder(MediaError):
    """The text of a prompt with pictures has a token of one outside of their places."""

    token: str

    @property
    def reason(self) -> str:
        return STRAY_TOKEN

    def __str__(self) -> str:
        return (
            f"the text has {self.token!r} outside of the places of its pictures, where the model "
            f"would read a part of one: write {PLACE!r} for a picture, and leave the token out"
        )


class WrongPlaces(MediaError):
    """The text of a prompt does not have one place for each of its pictures."""

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
