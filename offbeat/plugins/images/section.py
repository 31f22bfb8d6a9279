"""Defines section ``environment.images`` of a recipe."""

from typing import Annotated, Final, cast

from pydantic import Field

from offbeat.config.base import Config

PICTURE_KEYS: Final = ("image", "images")
"""Keys of a row that name pictures."""


class ImagesConfig(Config):
    """Pictures in prompts: their limits. A file of pictures is untrusted input."""

    max_pictures: Annotated[int, Field(ge=1, le=64)] = 1
    """Maximum pictures per prompt. Rows with more are refused when the file is read."""

    max_mib: Annotated[float, Field(gt=0)] = 16.0
    """Maximum MiB of float32 pixel values per prompt, after the processor has resized the pictures.
    If a prompt exceeds it, its group fails. The buffer reserves this much per group; `offbeat
    check` prints how much the first rows need."""

    max_file_mib: Annotated[float, Field(gt=0)] = 16.0
    """Maximum MiB of a picture file. Larger files are not read."""

    max_pixels: Annotated[int, Field(ge=1, le=2**26)] = 2**24
    """Maximum width times height of a picture, checked before decoding. A worker needs about 8
    bytes per pixel."""

    @property
    def max_bytes(self) -> int:
        """Return the maximum bytes of a prompt's media."""
        return int(self.max_mib * 2**20)


def images_section(environment: Config) -> ImagesConfig | None:
    """Return an environment's limits for pictures, or None if its prompts have no pictures."""
    return cast("ImagesConfig | None", getattr(environment, "images"))  # noqa: B009 -- the core's model has no such field
