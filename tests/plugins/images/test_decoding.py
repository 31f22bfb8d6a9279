"""Bytes of pictures are hostile: their limits hold before a pixel is decoded."""

import struct
import zlib
from collections.abc import Callable
from io import BytesIO

import numpy as np
import pytest

pytest.importorskip("PIL", reason="the extra vision is not installed")

from PIL import Image

from offbeat.plugins.images.decoding import decode_picture
from offbeat.plugins.images.errors import BadPicture

MOST = 2**16


def written(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(width: int = 20, height: int = 10, mode: str = "RGB") -> Image.Image:
    shape = (height, width, len(mode)) if len(mode) > 1 else (height, width)
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, np.uint8), mode=None)


def png(width: int, height: int, body: bytes = b"") -> bytes:
    """A file whose header promises these sides, with whatever behind it."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checked = kind + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    ends = chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + ends


def refused(content: bytes) -> str:
    with pytest.raises(BadPicture) as caught:
        decode_picture("a.png", content, MOST)
    assert caught.value.picture == "a.png"
    return caught.value.problem


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_picture_comes_in_rgb(kind: str) -> None:
    image = decode_picture("a", written(noise(), kind), MOST)
    assert (image.mode, image.size) == ("RGB", (20, 10))


@pytest.mark.parametrize("mode", ["L", "RGBA"])
def test_gray_and_transparent_pictures_come_in_rgb(mode: str) -> None:
    assert decode_picture("a", written(noise(mode=mode)), MOST).mode == "RGB"


def test_a_camera_that_was_turned_gives_an_upright_picture() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    content = written(noise(), "JPEG", exif=exif)
    assert decode_picture("a", content, MOST).size == (10, 20)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (lambda: b"", "is not one of PNG, JPEG, WEBP, by its 0 bytes"),
        (lambda: b"<svg onload='alert(1)'/>", "is not one of PNG, JPEG, WEBP"),
        (lambda: b"%!PS-Adobe-3.0 EPSF-3.0", "is not one of PNG, JPEG, WEBP"),
        (lambda: written(noise(), "GIF"), "is not one of PNG, JPEG, WEBP"),
        (lambda: written(noise(), "TIFF"), "is not one of PNG, JPEG, WEBP"),
        (lambda: written(noise())[:-40], "is damaged"),
        (lambda: written(noise(), "JPEG")[:-40], "is damaged"),
        (lambda: png(20, 10), "is damaged"),
        (lambda: png(20, 10, b"\0" * 10), "is damaged"),
        (lambda: png(0, 10), "is "),
        (lambda: png(257, 256), "257 x 256 pixels, which is 65792; .*max_pixels is 65536"),
        (lambda: png(9000, 9000), "has 9000 x 9000 pixels, which is 81000000"),
        (lambda: png(10_000, 10_000), "has too many pixels"),
        (lambda: png(100_000, 100_000), "has too many pixels"),
        (lambda: png(20_000, 1, b"\0" * 60_001), "one side is over 200 times the other"),
        (lambda: png(1, 201, b"\0" * 1000), "one side is over 200 times the other"),
    ],
)
def test_what_is_no_sound_picture_is_refused(content: Callable[[], bytes], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        raise ValueError(refused(content()))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_an_animation_is_refused(kind: str) -> None:
    moving = written(noise(), kind, save_all=True, append_images=[noise(mode="L").convert("RGB")])
    assert refused(moving) == "is an animation; save one of its pictures"


def test_a_comment_that_unpacks_to_a_gigabyte_is_refused() -> None:
    image = png(20, 10, b"\0" * 610)
    bomb = b"c\0\0" + zlib.compress(b"\0" * 2**24)
    checked = b"zTXt" + bomb
    chunk = struct.pack(">I", len(bomb)) + checked + struct.pack(">I", zlib.crc32(checked))
    assert "is damaged: ValueError: Decompressed data too large" in refused(
        image[:33] + chunk + image[33:]
    )


def test_a_picture_of_16_bits_is_refused_where_its_values_would_be_cut_to_white() -> None:
    depths = np.arange(100, dtype=np.uint16).reshape(10, 10) * 600
    assert "more than 8 bits (mode I;16)" in refused(written(Image.fromarray(depths)))


def test_a_drawing_that_is_all_black_without_its_transparency_is_refused() -> None:
    pixels = np.zeros((10, 20, 4), np.uint8)
    pixels[2:8, 5:15, 3] = 255
    assert "only one color without its transparency" in refused(written(Image.fromarray(pixels)))
    pixels[:, :, 3] = 255  # a black picture that is meant to be one
    assert decode_picture("a", written(Image.fromarray(pixels)), MOST).mode == "RGB"
