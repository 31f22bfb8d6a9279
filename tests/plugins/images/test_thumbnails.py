"""Small copies of pictures are made of the values that the model reads."""

import numpy as np
import pytest
from numpy.typing import NDArray

from offbeat.messages.media import Media
from offbeat.plugins.images.pictures import MediaKind, Pictures
from offbeat.plugins.images.thumbnails import THUMBNAILS, picture_sizes, thumbnails
from tests.support.pictures import patches, pixels


def shown(media: Media) -> list[NDArray[np.uint8]]:
    return [
        np.frombuffer(each.rgb, np.uint8).reshape(each.height, each.width, 3)
        for each in thumbnails(media)
    ]


def test_a_prompt_without_pictures_has_none() -> None:
    assert thumbnails(None) == []


def test_the_darkest_value_is_black_and_the_brightest_white() -> None:
    values = np.zeros((3, 2, 2), np.float32)
    values[:, 0, 1], values[0, 1, 0] = 2.0, -2.0
    media = Pictures(MediaKind.PIXELS, values.reshape(-1), np.array([[3, 2, 2]], np.int32)).media
    (picture,) = shown(media)
    assert picture[0, 1].tolist() == [255, 255, 255]
    assert picture[1, 0].tolist() == [0, 128, 128]


def test_a_picture_of_one_value_and_one_of_gray_can_be_shown() -> None:
    flat = Pictures(MediaKind.PIXELS, np.ones(4, np.float32), np.array([[1, 2, 2]], np.int32)).media
    assert shown(flat)[0].tolist() == np.zeros((2, 2, 3)).tolist()


@pytest.mark.parametrize(("sides", "small"), [((200, 100), (67, 34)), ((96, 96), (96, 96))])
def test_large_pictures_are_thinned_out(sides: tuple[int, int], small: tuple[int, int]) -> None:
    assert [each.shape[:2] for each in shown(pixels((3, *sides)))] == [small]


def test_no_more_than_the_first_pictures_are_copied() -> None:
    assert len(thumbnails(pixels(*[(3, 4, 4)] * (THUMBNAILS + 3)))) == THUMBNAILS


def test_patches_of_another_layout_than_qwens_are_not_shown() -> None:
    assert thumbnails(patches((1, 4, 4), values_per_patch=7)) == []
    assert thumbnails(patches((2, 4, 4), values_per_patch=3 * 2 * 64)) == []


def test_sizes_are_those_that_the_model_reads_in_pixels() -> None:
    assert picture_sizes(None) == []
    assert picture_sizes(pixels((3, 32, 24), (1, 8, 8))) == [(32, 24), (8, 8)]
    assert picture_sizes(patches((1, 4, 6), values_per_patch=3 * 2 * 64)) == [(32, 48)]
    assert picture_sizes(patches((1, 4, 4), values_per_patch=7)) == []
