"""Defines section ``environment.images`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class ImagesConfig(Config):
    """Pictures in prompts: their limits. A file of pictures is untrusted input."""

    max_pictures: Annotated[int, Field(ge=1, le=64)] = 1
    """Pictures of one prompt at most; a row that names more is refused when its file is read. More
    let a prompt compare pictures, and cost its group memory and the model tokens for each."""

    max_mib: Annotated[float, Field(gt=0)] = 16.0
    """MiB that the pictures of one prompt may take as the vision tower reads them: float32 values,
    after the model's processor has resized and cut them; a prompt with more fails its group. The
    buffer keeps room for as much in each group, so a tight limit lets more groups wait;
    `offbeat check` prints what the first rows take."""

    max_file_mib: Annotated[float, Field(gt=0)] = 16.0
    """MiB of a picture's file at most; nothing of a larger one is read. Raise it for lossless
    pictures of cameras; a worker then needs more memory for each."""

    max_pixels: Annotated[int, Field(ge=1, le=2**26)] = 2**24
    """Width times height of a picture at most, by its header, before anything is decoded. A worker
    needs about 8 bytes for each pixel; a few kilobytes of a file can promise billions."""
