"""Pictures in prompts are for some environments and backends; the others name what to set instead."""

from typing import Any

import pytest

from offbeat.config.crosschecks import clashes
from offbeat.config.limits import max_group_bytes
from tests.support.recipes import make_config

IMAGES: dict[str, Any] = {"environment": {"name": "digits", "images": {}}}


def told(**sections: Any) -> list[tuple[tuple[str, ...], str]]:
    found = clashes(make_config(**sections))
    return [(clash.keys, clash.hint) for clash in found if "environment.images" in clash.keys]


@pytest.mark.parametrize("backend", ["embedded", "vllm"])
def test_digits_in_pictures_on_an_engine_and_the_torch_trainer_are_fine(backend: str) -> None:
    assert told(**IMAGES, generator={"backend": backend}) == []


@pytest.mark.parametrize(
    ("sections", "key", "fix"),
    [
        ({"environment": {"name": "digits"}}, "environment.images", "Write `images:"),
        (
            {"environment": {"name": "arithmetic", "images": {}}},
            "environment.name",
            "one of function, custom, digits",
        ),
        (
            {"environment": {"name": "agent", "target": "a:b", "images": {}}},
            "environment.name",
            "one of function, custom, digits",
        ),
    ],
)
def test_what_reads_no_pictures_is_refused_by_name(
    sections: dict[str, Any], key: str, fix: str
) -> None:
    (found,) = told(**sections)
    assert key in found[0]
    assert fix in found[1]


def test_the_buffer_keeps_room_for_the_pictures_of_every_group() -> None:
    limited = {"environment": {"name": "digits", "images": {"max_mib": 0.5}}}
    assert max_group_bytes(make_config(**limited)) == 2**19 + max_group_bytes(make_config())
    small = make_config(**IMAGES, buffer={"capacity_mib": 8})
    (found,) = [clash for clash in clashes(small) if "buffer.capacity_mib" in clash.keys]
    assert "environment.images.max_mib" in found.hint
