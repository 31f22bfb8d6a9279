"""Decodes the bytes of a picture. Checks its limits before any pixel is decoded."""

from io import BytesIO
from typing import Final

from PIL import Image, ImageOps

from offbeat.messages.text import first_line
from offbeat.plugins.images.errors import BadPicture

_FORMATS: Final = ("PNG", "JPEG", "WEBP")
"""Accepted formats. Pillow has some sixty more, each with a parser of untrusted bytes."""

_MOST_ELONGATED: Final = 200
"""Maximum ratio of longest to shortest side: the limit of Qwen-VL's own processor."""


def decode_picture(name: str, content: bytes, max_pixels: int) -> Image.Image:
    """Return an upright RGB picture, the same as transformers loads from a file.

    Raises:
        BadPicture: It is not a PNG, JPEG or WebP, or is damaged. Or its header shows that it is
            animated, too large, too elongated or has more than 8 bits. Or it is blank once its
            transparency is dropped.
    """
    try:
        image = Image.open(BytesIO(content), formats=_FORMATS)
        problem = _problem_of_header(image, max_pixels)
        if problem is None:
            image.load()
            problem = _problem_of_transparency(image)
        if problem is None:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        problem = f"has too many pixels: {first_line(error)}"
    except Image.UnidentifiedImageError:
        problem = f"is not one of {', '.join(_FORMATS)}, by its {len(content)} bytes"
    except Exception as error:  # noqa: BLE001 - damaged bytes can make a decoder raise any error
        problem = f"is damaged: {type(error).__name__}: {first_line(error)}"
    raise BadPicture(name, problem)


def _problem_of_header(image: Image.Image, max_pixels: int) -> str | None:
    width, height = image.size
    if min(width, height) < 1:
        return f"has {width} x {height} pixels"
    if width * height > max_pixels:
        most = f"environment.images.max_pixels is {max_pixels}"
        return f"has {width} x {height} pixels, which is {width * height}; {most}"
    if max(width, height) > _MOST_ELONGATED * min(width, height):
        return f"has {width} x {height} pixels: one side is over {_MOST_ELONGATED} times the other"
    if image.mode.startswith(("I", "F")):
        # Pillow clips every value above 255 to 255, so a scan would become a white picture.
        return f"has values of more than 8 bits (mode {image.mode}); save it with 8 bits a channel"
    # A camera's JPEG may hold a preview as a second picture (MPO). Use the first one.
    if getattr(image, "is_animated", False) and image.format != "MPO":
        return "is an animation; save one of its pictures"
    return None


def _problem_of_transparency(image: Image.Image) -> str | None:
    """Return a problem if the drawing is only in the transparency, which RGB drops."""
    if not image.has_transparency_data:
        return None
    *colors, alpha = image.convert("RGBA").split()
    if any(_varies(color) for color in colors) or not _varies(alpha):
        return None
    return "has only one color without its transparency: put it on a background"


def _varies(channel: Image.Image) -> bool:
    low, high = channel.getextrema()
    return low != high
