"""The rows of a data set are other people's input: a path stays in its folder, nothing is fetched."""

import base64
import os
import re
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.environments.prompt_files import FilePrompts, PromptFileError
from offbeat.environments.row_checks import row_check
from offbeat.messages.groups import Prompt
from offbeat.plugins.images.errors import BadPicture
from offbeat.plugins.images.rows import (
    get_pictures,
    names_pictures,
    picture_bytes,
    pictures_problem,
    shown,
    without_content,
)
from offbeat.plugins.images.section import images_section

MOST = 1024
READS_PICTURES = EnvironmentConfig.model_validate(
    {"name": "function", "target": "rewards:reward", "images": {}}
)


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


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
        ("", "is not a file path"),
        ("a\0.png", "is not a file path"),
        ("\ud800.png", "is not a file path"),
        (7, "is not a file path"),
        ({"url": "http://example.org"}, "is not a file path"),
        (b"a.png", "is not a file path"),
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
        with pytest.raises(BadPicture, match="is outside of"):
            content(folder, name)


def test_a_file_that_is_not_there_or_no_file_is_a_problem_of_the_row(folder: Path) -> None:
    os.mkfifo(folder / "pipe.png")
    for name, told in (
        ("b.png", "cannot be read from"),
        ("pictures/a.png/b.png", "cannot be read from"),
        ("pictures", "Is a directory"),
        ("pipe.png", "not a regular file"),
    ):
        with pytest.raises(BadPicture, match=told):
            content(folder, name)


def test_nothing_is_read_of_a_file_that_is_too_large(folder: Path) -> None:
    with (folder / "large.png").open("wb") as file:
        file.truncate(2**40)  # takes no space
    with pytest.raises(BadPicture, match=f"has {2**40} bytes; at most {MOST} are read"):
        content(folder, "large.png")


def test_a_name_that_no_file_can_have_is_a_problem_of_the_row_and_no_outage(folder: Path) -> None:
    (folder / "loop.png").symlink_to("loop.png")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(folder / "socket.png"))
        for name in ("loop.png", "loop.png/a.png", "a" * 300 + ".png", "a/" * 3000, "socket.png"):
            with pytest.raises(BadPicture, match="cannot be read from"):
                content(folder, name)


def test_a_prompt_that_comes_from_no_file_names_no_file() -> None:
    with pytest.raises(BadPicture, match="comes from no file"):
        picture_bytes(Prompt(0, 0, 0, {}), "a.png", MOST)


def test_a_row_names_one_picture_or_a_list_of_them() -> None:
    assert get_pictures({"image": "a.png"}) == ["a.png"]
    assert get_pictures({"images": ["a.png", "b.png"]}) == ["a.png", "b.png"]
    assert get_pictures({"image": None, "images": ["a.png"]}) == ["a.png"]
    assert not names_pictures({"prompt": "<image>", "image": None})


PART = {"type": "image"}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"image": "a", "images": ["b"]}, "both 'image' and 'images'"),
        ({"images": {}}, "it must be a list of pictures"),
        ({"images": "a.png"}, "it must be a list of pictures"),
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
    with_null = {"image": "a.png", "messages": [user([PART | {"text": None, "image": None}])]}
    assert pictures_problem(with_null, 1) is None


IN_ROW = {"bytes": base64.b64encode(b"a picture").decode()}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "<image>=", "picture": "a.png"}, "has a place '<image>' without its picture"),
        ({"messages": [user("<image>=")]}, "has a place '<image>' without its picture"),
        ({"messages": [user([{"type": "text", "text": "<image>"}])]}, "has a place '<image>'"),
        (
            {"messages": [user([{"type": "image"}])]},
            r"messages\[0\] a part of type 'image' without",
        ),
        ({"messages": [user([{"type": "image", "image": "a.png"}])]}, "of type 'image' without"),
        ({"messages": [user([{"type": "image_url", "image_url": {}}])]}, "of type 'image_url'"),
    ],
)
def test_a_row_with_a_place_that_names_no_picture_is_refused(
    row: dict[str, Any], told: str
) -> None:
    problem = row_check(READS_PICTURES)(row)
    assert problem is not None
    assert re.search(told, problem)


@pytest.mark.parametrize("row", [{"images": []}, {"image": None, "images": []}, {"image": []}])
@pytest.mark.parametrize("images", [None, images_section(READS_PICTURES)])
def test_a_row_of_mixed_data_with_an_empty_list_of_pictures_is_one_of_text(
    row: dict[str, object], images: Any
) -> None:
    problem_of = row_check(READS_PICTURES.model_copy(update={"images": images}))
    row = {"prompt": "1+1=", **row}
    assert problem_of(row) is None
    assert not names_pictures(row)
    assert get_pictures(row) == []
    assert without_content(row) == row
    assert get_pictures({**row, "image": "a.png"}) == ["a.png"]


def test_a_place_beside_an_empty_list_of_pictures_is_refused() -> None:
    problem = row_check(READS_PICTURES)({"prompt": "<image>=", "images": []})
    assert "has a place '<image>' without its picture" in str(problem)


def test_without_environment_images_the_place_is_text_and_a_part_of_an_image_is_not() -> None:
    reads_text = row_check(READS_PICTURES.model_copy(update={"images": None}))
    assert reads_text({"prompt": "What does <image> mean in HTML?"}) is None
    assert reads_text({"messages": [user([{"type": "text", "text": "Hello"}])]}) is None
    assert "a part of type 'image'" in str(reads_text({"messages": [user([{"type": "image"}])]}))


def test_a_custom_environment_may_have_another_name_for_its_pictures() -> None:
    custom = READS_PICTURES.model_copy(update={"name": "custom"})
    assert row_check(custom)({"prompt": "<image>=", "scan": "a.dcm"}) is None


def test_a_row_may_hold_a_picture_itself(folder: Path) -> None:
    assert pictures_problem({"prompt": "<image>", "image": IN_ROW}, 1) is None
    assert content(folder, IN_ROW) == b"a picture"
    assert picture_bytes(Prompt(0, 0, 0, {}), IN_ROW, 9) == b"a picture"


@pytest.mark.parametrize(
    ("text", "told"),
    [("A" * 4096, "is too large; at most 1024 bytes"), ("no base64!", "is not base64")],
)
def test_a_picture_in_its_row_has_the_limits_of_a_file(folder: Path, text: str, told: str) -> None:
    with pytest.raises(BadPicture, match=f"bytes in its row' {told}"):
        content(folder, {"bytes": text})


A_PATH = {"path": "pictures/a.png"}


@pytest.mark.parametrize("picture", [A_PATH, A_PATH | {"bytes": None}])
def test_a_picture_may_be_named_in_a_struct_by_its_path(
    folder: Path, picture: dict[str, Any]
) -> None:
    assert pictures_problem({"prompt": "<image>", "image": picture}, 1) is None
    assert pictures_problem({"prompt": "<image>", "images": [picture]}, 1) is None
    assert content(folder, picture) == b"a picture"
    assert shown(picture) == "pictures/a.png"


def test_of_bytes_and_a_path_the_bytes_count_and_the_path_leads_nowhere(folder: Path) -> None:
    picture = IN_ROW | {"path": "/elsewhere/a.png"}
    assert pictures_problem({"prompt": "<image>", "image": picture}, 1) is None
    assert content(folder, picture) == b"a picture"


@pytest.mark.parametrize(
    ("picture", "told"),
    [
        ({"path": "../secret.png"}, "leads out of the folder"),
        ({"path": "https://x/a.png", "bytes": None}, "is an address"),
        ({"path": None, "bytes": None}, "is not a file path"),
        ({"path": {"path": "pictures/a.png"}}, "is not a file path"),
        ({"file": "pictures/a.png"}, "is not a file path"),
    ],
)
def test_a_struct_that_names_no_file_of_the_folder_is_refused_as_a_path_is(
    folder: Path, picture: dict[str, Any], told: str
) -> None:
    assert told in str(pictures_problem({"prompt": "<image>", "image": picture}, 1))
    with pytest.raises(BadPicture, match=told):
        content(folder, picture)


def test_a_reward_and_a_log_read_how_many_bytes_a_row_holds_and_not_the_bytes() -> None:
    row = {"prompt": "<image>", "images": [IN_ROW, "a.png"], "answer": 7}
    assert without_content(row) == row | {"images": ["of 9 bytes in its row", "a.png"]}
    assert without_content({"prompt": "1+1="}) == {"prompt": "1+1="}


def files_of(path: Path, values: Any, **options: Any) -> list[dict[str, Any]]:
    pq.write_table(pa.table(values), path)
    prompts = FilePrompts([path], shuffle=False, seed=0, epochs=1, **options)
    return [prompt.data for index in range(prompts.rows) if (prompt := prompts.prompt(index))]


def test_a_parquet_file_holds_pictures_as_bytes_as_structs_or_in_lists(tmp_path: Path) -> None:
    path, image = tmp_path / "rows.parquet", b"a picture"
    text = {"prompt": ["<image>"]}
    as_struct = [{"bytes": image, "path": "a.png"}]
    assert files_of(path, text | {"image": [image]})[0]["image"] == IN_ROW
    assert files_of(path, text | {"image": as_struct})[0]["image"] == IN_ROW
    assert files_of(path, text | {"images": [as_struct]})[0]["images"] == [IN_ROW]
    by_path = pa.array(
        [{"bytes": None, "path": "a.png"}],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    assert files_of(path, text | {"image": by_path})[0]["image"] == "a.png"
    renamed = {"prompt": "prompt", "image": "picture"}
    assert files_of(path, text | {"picture": [image]}, columns=renamed)[0]["image"] == IN_ROW


@pytest.mark.parametrize("kind", [pa.large_binary(), pa.binary_view()], ids=str)
def test_bytes_of_every_kind_are_a_picture_and_no_other_column(
    tmp_path: Path, kind: pa.DataType
) -> None:
    path, image = tmp_path / "rows.parquet", pa.array([b"a picture"], kind)
    prompt = pa.array(["<image>"], pa.string_view())
    assert files_of(path, {"prompt": prompt, "image": image}) == [
        {"prompt": "<image>", "image": IN_ROW}
    ]
    struct = pa.StructArray.from_arrays([image, prompt], ["bytes", "path"])
    assert files_of(path, {"prompt": prompt, "image": struct})[0]["image"] == IN_ROW
    with pytest.raises(
        PromptFileError, match=f"column 'scan' of type {kind}, which no prompt can hold"
    ):
        files_of(path, {"prompt": prompt, "scan": image})


def test_rows_of_text_in_a_parquet_file_have_null_or_an_empty_list_of_pictures(
    tmp_path: Path,
) -> None:
    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    a, none = {"bytes": b"a picture", "path": None}, {"bytes": None, "path": None}
    texts = {"prompt": ["<image>", "1+1=", "2+2=", "3+3="]}
    several = pa.array([[a], [], None], pa.list_(picture))
    rows = files_of(tmp_path / "l.parquet", {"prompt": texts["prompt"][:3], "images": several})
    assert [names_pictures(row) for row in rows] == [True, False, False]
    single = pa.array([a, None, none, None], picture)
    rows = files_of(tmp_path / "s.parquet", texts | {"image": single})
    assert [names_pictures(row) for row in rows] == [True, False, False, False]
    columns = {"prompt": "prompt", "image": "photo"}
    rows = files_of(tmp_path / "c.parquet", texts | {"photo": single}, columns=columns)
    assert [names_pictures(row) for row in rows] == [True, False, False, False]
