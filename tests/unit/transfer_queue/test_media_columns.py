from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from offbeat.messages.failures import SchemaError
from offbeat.messages.media import Media, MediaKind
from offbeat.transfer_queue.media_columns import columns_of_media, media_of
from offbeat.transfer_queue.schema import MEDIA_COLUMNS, check, payload_bytes
from offbeat.transfer_queue.spool import SpoolWriter, read
from tests.support.pictures import patches, pixels
from tests.unit.transfer_queue.test_schema import group

TWO = pixels((3, 4, 4), (3, 2, 8))


@pytest.mark.parametrize("media", [TWO, patches((1, 4, 4), (1, 2, 2))])
def test_pictures_come_back_from_the_columns_as_they_went_in(media: Media) -> None:
    columns = {**group(), **columns_of_media(media)}
    check(columns)
    back = media_of(columns)
    assert back is not None
    assert back.kind is media.kind
    assert back.sizes.tolist() == media.sizes.tolist()
    np.testing.assert_array_equal(back.values, media.values)


def test_a_group_without_pictures_has_none() -> None:
    assert media_of(group()) is None


def test_pictures_count_in_the_bytes_of_their_group_once() -> None:
    whole = {**group(), **columns_of_media(TWO)}
    assert payload_bytes(whole) == payload_bytes(group()) + 4 * (96 + 6 + 1)


def test_the_spool_gives_a_group_with_pictures_back(tmp_path: Path) -> None:
    columns = {**group(), **columns_of_media(TWO)}
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
        ("media_values", NAN, "nan at index 0"),
        ("media_sizes", np.array([3, 4], np.int32), "three sides above 0"),
        ("media_sizes", np.array([], np.int32), "three sides above 0"),
        ("media_sizes", np.array([3, 4, 0], np.int32), "three sides above 0"),
        ("media_sizes", np.array([2**31 - 1] * 3, np.int32), "96 values"),
        ("media_kind", np.array([7], np.int32), r"one of 0 \(pixels\), 1 \(patches\)"),
        ("media_kind", np.array([0, 0], np.int32), r"shape \(2,\)"),
    ],
)
def test_columns_of_pictures_that_do_not_fit_each_other_are_named(
    column: str, values: NDArray[Any], complaint: str
) -> None:
    columns = {**group(), **columns_of_media(TWO), column: values}
    with pytest.raises(SchemaError, match=f"column 'media_.*{complaint}"):
        check(columns)
    with pytest.raises(SchemaError):
        media_of(columns)


@pytest.mark.parametrize("name", MEDIA_COLUMNS)
def test_one_column_of_pictures_needs_the_others(name: str) -> None:
    columns = {**group(), **columns_of_media(TWO)}
    del columns[name]
    with pytest.raises(SchemaError, match=f"column '{name}' is missing"):
        check(columns)


def test_patches_are_a_whole_number_of_values_each() -> None:
    uneven = Media(MediaKind.PATCHES, np.zeros(17, np.float32), np.array([[1, 2, 2]], np.int32))
    with pytest.raises(SchemaError, match="a multiple of 4, the patches"):
        columns_of_media(uneven)


def test_sizes_are_rows_of_three() -> None:
    flat = msgspec.structs.replace(TWO, sizes=TWO.sizes.reshape(-1))
    with pytest.raises(SchemaError, match=r"shape \(6,\); .* \(pictures, 3\)"):
        columns_of_media(flat)
