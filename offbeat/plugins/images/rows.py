"""Finds the pictures that a prompt names, and reads their bytes.

A row names a picture under ``image``, or a list of pictures under ``images``. Each is the path of a
file, relative to the folder of the data file, or ``{"bytes": base64, "path": path}``. One of the
two may be null or left out. A Parquet file has raw bytes. If both are given, the bytes are used,
and the path is only their former name. Rows of a data set are untrusted input. So nothing is
fetched from an address, and no path leaves the folder, not even through a link.
"""

import base64
import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.environments.row_checks import reads_any_key
from offbeat.messages.groups import Prompt
from offbeat.plugins.images.errors import PLACE, BadPicture
from offbeat.plugins.images.section import PICTURE_KEYS, images_section

_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_UNNAMEABLE: Final = re.compile("[\0\ud800-\udfff]")  # surrogates are not UTF-8
_OF_THE_NAME: Final = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM),
        *(errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO),  # ENXIO: a socket
    }
)
"""Errors caused by a file or its name. The file system causes all other errors."""

_NON_TEXT_PARTS: Final = (
    *("image", "image_url", "input_image"),
    *("video", "video_url", "audio", "audio_url", "input_audio"),
)
"""Types of message parts without text, as the model families' libraries name them."""


def names_pictures(row: Mapping[str, object]) -> bool:
    """Return whether a row names pictures. A row with null or an empty list is text."""
    return any(_read_value(row, key) is not None for key in PICTURE_KEYS)


def get_pictures(row: Mapping[str, object]) -> Sequence[object]:
    """Return a row's entries for pictures, in order, or an empty sequence."""
    single, several = (_read_value(row, key) for key in PICTURE_KEYS)
    if single is not None:
        return [single]
    return cast("Sequence[object]", several or [])


def name_pictures(row: Mapping[str, object]) -> list[str]:
    """Return printable names of the pictures of a row."""
    named: object = get_pictures(row)
    return [shown(each) for each in cast("list[Any]", named)] if isinstance(named, list) else []


def pictures_problem(row: Mapping[str, object], most: int) -> str | None:
    """Return the problem with a row's pictures without reading files, or None."""
    single, several = (_read_value(row, key) for key in PICTURE_KEYS)
    if single is not None and several is not None:
        return "has both 'image' and 'images'; give one"
    if several is not None and not isinstance(several, list):
        return f"'images' is {several!r:.80}; it must be a list of pictures"
    pictures = get_pictures(row)
    if len(pictures) > most:
        return f"has {len(pictures)} pictures; environment.images.max_pictures is {most}"
    if problem := _problem_of_messages(row.get("messages")):
        return problem
    for picture in pictures:
        if problem := _problem_of_name(picture):
            return f"has a picture {picture!r:.80} that {problem}"
    return None


def place_problem(row: Mapping[str, object], *, has_places: bool) -> str | None:
    """Return the problem of a picture place in a row without pictures, or None without places.

    Args:
        row: A row with ``prompt`` or ``messages`` of the right form.
        has_places: Whether ``<image>`` in a text is a place for a picture.
    """
    fix = "name it under 'image' or 'images', or in data.columns; the model would not see it"
    messages = cast("list[Mapping[str, object]]", row.get("messages") or [])
    texts = [row.get("prompt"), *(message.get("content") for message in messages)]
    for place, part in _parts(messages):
        kind = part.get("type")
        if kind in _NON_TEXT_PARTS:
            is_image = "image" in str(kind)
            problem = f" without its picture: {fix}" if is_image else ", which no prompt shows"
            return f"has in messages[{place}] a part of type {kind!r}{problem}"
        texts.append(part.get("text"))
    if has_places and any(isinstance(text, str) and PLACE in text for text in texts):
        return f"has a place {PLACE!r} without its picture: {fix}"
    return None


def _read_value(row: Mapping[str, object], key: str) -> object:
    """Return a row's value of a picture key, or None for an empty list, as in mixed data."""
    value = row.get(key)
    return None if value == [] else value


def _problem_of_messages(messages: object) -> str | None:
    """Return the problem of a message that contains more than a picture's place, or None."""
    for place, part in _parts(cast("list[Mapping[str, object]]", messages or [])):
        if (kind := part.get("type")) == "text":
            continue
        given = {key for key, value in part.items() if value is not None}
        extra = given - {"type", "text"}
        if kind != "image" or extra:
            more = f" with {', '.join(extra)}" if extra else ""
            got = f"a part of type {kind!r:.40}{more}"
            return (
                f"has in messages[{place}] {got:.120}; name the picture under 'images' and "
                'write {"type": "image"} in its place'
            )
    return None


def _parts(
    messages: Sequence[Mapping[str, object]],
) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the parts of all list contents, each with the number of its message."""
    for place, message in enumerate(messages):
        content = message.get("content")
        for part in cast("list[object]", content) if isinstance(content, list) else []:
            if isinstance(part, dict):
                yield place, cast("dict[str, object]", part)


def picture_bytes(prompt: Prompt, picture: object, max_bytes: int) -> bytes:
    """Return the content of a picture, from its file or from the row itself.

    Raises:
        BadPicture: The bytes in the row are not base64 or too many. Or the path leads out of the
            data file's folder. Or the file is missing, is not a regular file, or is too large.
        OSError: The file system failed, not the file.
    """
    name = shown(picture)
    if (content := _content(picture)) is not None:
        return _decode_base64(name, content, max_bytes)
    if problem := _problem_of_name(picture):
        raise BadPicture(name, problem)
    if not prompt.folder:
        raise BadPicture(name, "is a path, but the prompt comes from no file")
    folder = Path(os.path.realpath(prompt.folder))
    path = Path(os.path.realpath(folder / name))
    if not path.is_relative_to(folder):
        raise BadPicture(name, f"is outside of {folder}, the folder of the data file")
    try:
        with open(path, "rb", opener=_open) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise BadPicture(name, "is not a regular file")
            if found.st_size > max_bytes:
                raise BadPicture(name, f"has {found.st_size} bytes; at most {max_bytes} are read")
            content = file.read(max_bytes + 1)
    except OSError as error:
        if error.errno not in _OF_THE_NAME:
            raise
        raise BadPicture(name, f"cannot be read from {folder}: {error.strerror}") from error
    if len(content) > max_bytes:
        raise BadPicture(name, f"grew beyond {max_bytes} bytes while it was read")
    return content


def without_content(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with only the number of bytes in place of each picture's content."""
    if not names_pictures(row):
        return dict(row)
    brief = {
        key: [_brief(each) for each in cast("list[object]", row[key])]
        if isinstance(row[key], list)
        else _brief(row[key])
        for key in PICTURE_KEYS
        if key in row
    }
    return {**row, **brief}


def shown(picture: object) -> str:
    """Return a printable name of a picture."""
    content = _content(picture)
    if content is not None:
        return f"of {len(content) * 3 // 4} bytes in its row"
    return str(_path(picture))


def _brief(picture: object) -> object:
    return picture if _content(picture) is None else shown(picture)


def _content(picture: object) -> str | None:
    """Return the encoded content of a picture in the row, or None for any other value."""
    match picture:
        case {"bytes": str(content)}:
            return content
        case _:
            return None


def _path(picture: object) -> object:
    """Return the file path of a picture that is not contained in the row."""
    return cast("dict[str, object]", picture).get("path") if isinstance(picture, dict) else picture


def _decode_base64(name: str, content: str, max_bytes: int) -> bytes:
    if len(content) * 3 // 4 > max_bytes + 2:  # 2 for padding
        raise BadPicture(name, f"is too large; at most {max_bytes} bytes are read")
    try:
        return base64.b64decode(content, validate=True)
    except ValueError as error:
        raise BadPicture(name, f"is not base64: {error}") from error


def _open(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def _problem_of_name(picture: object) -> str | None:
    """Return why this value cannot name a picture, or None if it can."""
    if _content(picture) is not None:
        return None
    path = _path(picture)
    if not isinstance(path, str) or not path or _UNNAMEABLE.search(path):
        return "is not a file path"
    if _ADDRESS.match(path):
        return "is an address, but nothing is fetched: download it to the folder of the data file"
    if Path(path).is_absolute() or ".." in Path(path).parts:
        return "leads out of the folder of the data file: name it relative to that, without '..'"
    return None


_READ_PICTURES: Final = ("function", "custom")
"""Environments whose prompts may have pictures. The model's processor encodes them."""


def row_problem(config: EnvironmentConfig, row: Mapping[str, object]) -> str | None:
    """Return the problem with a row's pictures, such as missing ones, or None."""
    images = images_section(config)
    if not names_pictures(row):
        if reads_any_key(config):
            return None
        return place_problem(row, has_places=images is not None)
    if images is not None and config.name in _READ_PICTURES:
        return pictures_problem(row, images.max_pictures)
    if reads_any_key(config):
        return None
    fix = "set environment.images" if config.name in _READ_PICTURES else "it reads only text"
    return (
        f"names a picture under 'image' or 'images', which environment.name={config.name} would not "
        f"show to the model: {fix}, or name the columns that are needed in data.columns"
    )
