"""Pictures in the log of samples."""

from offbeat.environments.media_prompts import find_media
from offbeat.messages.media import get_media
from offbeat.rollouts.log_table import build_table
from offbeat.rollouts.rollout_log import LoggedGroup
from tests.support.pictures import pixels
from tests.unit.rollouts.test_rollout_log import finished


def test_the_first_row_of_a_group_has_small_copies_of_its_pictures() -> None:
    task, receipt, columns = finished(0)
    pictured = {**columns, **pixels((3, 32, 32))}
    media, nbytes = find_media().log_values(get_media(pictured))
    first, second = build_table([LoggedGroup(task, receipt, columns, media)])[
        "pictures"
    ].to_pylist()
    assert nbytes == 32 * 32 * 3
    assert [len(each["rgb"]) for each in first] == [32 * 32 * 3]
    assert second is None


def test_the_first_row_of_a_group_has_the_sizes_of_all_its_pictures() -> None:
    task, receipt, columns = finished(0)
    media, _ = find_media().log_values(pixels(*[(3, 32, 24)] * 6))
    logged = build_table([LoggedGroup(task, receipt, columns, media)])
    first, second = logged["picture_sizes"].to_pylist()
    assert first == [{"height": 32, "width": 24}] * 6
    assert second is None
