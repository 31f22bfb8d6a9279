"""The rows of a data set are other people's input: a path stays in its folder, nothing is fetched."""

import os
from pathlib import Path
from typing import Any

import pytest

from offbeat.environments.picture_errors import BadPicture
from offbeat.environments.picture_rows import (
    names_pictures,
    picture_bytes,
    pictures_of,
    pictures_problem,
)
from offbeat.messages.groups import Prompt

MOST = 1024


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data file's folder, and a secret beside it."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    data = tmp_path / "data"
    (data / "pictures").mkdir(parents=True)
    (data / "pictures" / "a.png").write_bytes(b"a picture")
    return data


def content(folder: Path, name: Any) -> bytes:
    return picture_bytes(Prompt(0, 0, 0, {}, folder=str(folder)), name, MOST)


def test_a_path_is_relative_to_the_data_file(folder: Path) -> None:
    assert content(folder, "pictures/a.png") == b"a picture"


def test_the_folder_of_the_data_file_may_be_reached_by_a_link(folder: Path) -> None:
    (folder.parent / "link").symlink_to(folder)
    assert content(folder.parent / "link", "pictures/a.png") == b"a picture"


def test_a_link_that_stays_in_the_folder_is_followed(folder: Path) -> None:
    (folder / "b.png").symlink_to("pictures/a.png")
    assert content(folder, "b.png") == b"a picture"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("../secret.png", "leads out of the folder"),
        ("pictures/../../secret.png", "leads out of the folder"),
        ("/etc/passwd", "leads out of the folder"),
        ("http://example.org/a.png", "nothing is fetched"),
        ("HTTPS://example.org/a.png", "nothing is fetched"),
        ("file:///etc/passwd", "nothing is fetched"),
        ("data:image/png;base64,AAAA", "nothing is fetched"),
        ("hf://datasets/a/b/c.png", "nothing is fetched"),
        ("", "is no path"),
        ("a\0.png", "is no path"),
        (7, "is no path"),
        ({"url": "http://example.org"}, "is no path"),
        (b"a.png", "is no path"),
    ],
)
def test_a_name_that_leads_elsewhere_is_refused_with_its_row_and_again_when_it_is_read(
    folder: Path, name: object, told: str
) -> None:
    problem = pictures_problem({"prompt": "<image>", "image": name}, 1)
    assert problem is not None
    assert told in problem
    with pytest.raises(BadPicture, match=told):
        content(folder, name)


def test_a_link_out_of_the_folder_is_not_followed(folder: Path) -> None:
    (folder / "b.png").symlink_to("../secret.png")
    (folder / "up").symlink_to("..")
    for name in ("b.png", "up/secret.png"):
        with pytest.raises(BadPicture, match="lies outside of"):
            content(folder, name)


def test_a_file_that_is_not_there_or_no_file_is_a_problem_of_the_row(folder: Path) -> None:
    os.mkfifo(folder / "pipe.png")
    for name, told in (
        ("b.png", "cannot be read from"),
        ("pictures/a.png/b.png", "cannot be read from"),
        ("pictures", "Is a directory"),
        ("pipe.png", "no regular file"),
    ):
        with pytest.raises(BadPicture, match=told):
            content(folder, name)


def test_nothing_is_read_of_a_file_that_is_too_large(folder: Path) -> None:
    with (folder / "large.png").open("wb") as file:
        file.truncate(2**40)  # takes no space
    with pytest.raises(BadPicture, match=f"has {2**40} bytes; at most {MOST} are read"):
        content(folder, "large.png")


def test_a_prompt_that_comes_from_no_file_names_no_file() -> None:
    with pytest.raises(BadPicture, match="comes from no file"):
        picture_bytes(Prompt(0, 0, 0, {}), "a.png", MOST)


def test_a_row_names_one_picture_or_a_list_of_them() -> None:
    assert pictures_of({"image": "a.png"}) == ["a.png"]
    assert pictures_of({"images": ["a.png", "b.png"]}) == ["a.png", "b.png"]
    assert pictures_of({"image": None, "images": ["a.png"]}) == ["a.png"]
    assert not names_pictures({"prompt": "<image>", "image": None})


PART = {"type": "image"}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"image": "a", "images": ["b"]}, "both 'image' and 'images'"),
        ({"images": []}, "a list of at least one"),
        ({"images": "a.png"}, "a list of at least one"),
        ({"images": ["a", "b", "c"]}, "has 3 pictures; environment.images.max_pictures is 2"),
        (
            {"image": "a", "messages": [{"role": "user", "content": [PART | {"url": "http://x"}]}]},
            r"messages\[0\] a part of type 'image' with url; name the picture under 'images'",
        ),
        (
            {"image": "a", "messages": [{"role": "user", "content": [{"type": "video"}]}]},
            "a part of type 'video'",
        ),
    ],
)
def test_a_row_whose_pictures_cannot_be_told_is_refused(row: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        raise ValueError(pictures_problem(row, 2))


def test_messages_have_places_for_the_pictures_of_their_row() -> None:
    content = [PART, {"type": "text", "text": "What is it?"}]
    row = {"image": "a.png", "messages": [{"role": "user", "content": content}]}
    assert pictures_problem(row, 1) is None
