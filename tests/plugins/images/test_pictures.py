from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from offbeat.messages.failures import SchemaError
from offbeat.messages.media import Media, get_media
from offbeat.plugins.images.pictures import MediaKind, Pictures
from offbeat.transfer_queue.schema import check, payload_bytes
from offbeat.transfer_queue.spool import SpoolWriter, read
from tests.support.pictures import patches, pixels
from tests.unit.transfer_queue.test_schema import group

TWO = pixels((3, 4, 4), (3, 2, 8))


@pytest.mark.parametrize("media", [TWO, patches((1, 4, 4), (1, 2, 2))])
def test_pictures_come_back_from_the_columns_as_they_went_in(media: Media) -> None:
    columns = {**group(), **media}
    check(columns)
    found = get_media(columns)
    assert found is not None
    back = Pictures.of(found)
    for name, values in back.media.items():
        np.testing.assert_array_equal(values, media[name])


def test_a_group_without_pictures_has_none() -> None:
    assert get_media(group()) is None


def test_pictures_count_in_the_bytes_of_their_group_once() -> None:
    whole = {**group(), **TWO}
    assert payload_bytes(whole) == payload_bytes(group()) + 4 * (96 + 6 + 1)


def test_the_spool_gives_a_group_with_pictures_back(tmp_path: Path) -> None:
    columns = {**group(), **TWO}
    place = SpoolWriter(tmp_path, "worker-0", "a").write(columns)
    found = read(tmp_path, place)
    assert found.keys() == columns.keys()
    for name, values in columns.items():
        np.testing.assert_array_equal(np.asarray(found[name]), values)


NAN = np.full(96, np.nan, np.float32)


@pytest.mark.parametrize(
    ("column", "values", "complaint"),
    [
        ("media_values", np.zeros(95, np.float32), "95 values; .* 96, by media_sizes"),
        ("media_values", np.zeros(96, np.float64), "dtype float64"),
        ("media_sizes", np.array([3, 4], np.int32), "three sides above 0"),
        ("media_sizes", np.array([], np.int32), "three sides above 0"),
        ("media_sizes", np.array([3, 4, 0], np.int32), "three sides above 0"),
        ("media_sizes", np.array([2**31 - 1] * 3, np.int32), "96 values"),
        ("media_kind", np.array([7], np.int32), r"one of 0 \(pixels\), 1 \(patches\)"),
        ("media_kind", np.array([0, 0], np.int32), "one of 0"),
    ],
)
def test_columns_of_pictures_that_do_not_fit_each_other_are_named(
    column: str, values: NDArray[Any], complaint: str
) -> None:
    columns = {**group(), **TWO, column: values}
    with pytest.raises(SchemaError, match=f"column 'media_.*{complaint}"):
        Pictures.of(get_media(columns) or {})


@pytest.mark.parametrize(
    ("name", "values", "complaint"),
    [
        ("media_values", NAN, "nan at index 0"),
        ("media_sizes", np.zeros((2, 3), np.int32), r"shape \(2, 3\)"),
        ("media_kind", [0], "a list"),
    ],
)
def test_the_queue_checks_of_media_only_what_holds_for_any(
    name: str, values: Any, complaint: str
) -> None:
    with pytest.raises(SchemaError, match=f"column '{name}' .*{complaint}"):
        check({**group(), **TWO, name: values})
    check({**group(), "media_of_an_option": np.arange(3)})


@pytest.mark.parametrize("name", TWO)
def test_one_column_of_pictures_needs_the_others(name: str) -> None:
    with pytest.raises(SchemaError, match=f"column '{name}' is missing"):
        Pictures.of({key: values for key, values in TWO.items() if key != name})


def test_patches_are_a_whole_number_of_values_each() -> None:
    sizes = np.array([[1, 2, 2]], np.int32)
    uneven = Pictures(MediaKind.PATCHES, np.zeros(17, np.float32), sizes).media
    with pytest.raises(SchemaError, match="a multiple of 4, the patches"):
        Pictures.of(uneven)
