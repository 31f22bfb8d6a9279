"""Tensors in files by torch's distributed checkpoint, as one rank writes and reads them."""

import os
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from offbeat.trainers.ranks.peers import SingleRank
from offbeat.trainers.torch.state import (
    METADATA,
    load_shards,
    read_saved_names,
    save_shards,
)


class Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def __reduce__(self) -> object:
        return os.mkdir, (str(self._place),)


def test_tensors_come_back_in_their_types_to_the_last_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "weight/a.b": torch.randn(3, 5, dtype=torch.float64),
        "weight/strided": torch.randn(4, 6).T,
        "part/of another": torch.randn(10, 4)[2:5],
        "small": torch.tensor(7),
        "half": torch.randn(8, dtype=torch.bfloat16),
        "random state": torch.get_rng_state(),
    }
    save_shards(tensors, tmp_path, SingleRank())
    assert read_saved_names(tmp_path) == tensors.keys()
    again = {name: torch.zeros_like(each) for name, each in tensors.items()}
    load_shards(again, tmp_path, SingleRank())
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert (tmp_path / "__0_0.distcp").stat().st_size < 2**14


def test_what_is_written_depends_on_the_tensors_alone(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        save_shards({"a": torch.arange(6.0)}, tmp_path / name, SingleRank())
    files = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert files == [METADATA, "__0_0.distcp"]
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_librarys_own_reader_takes_it(tmp_path: Path) -> None:
    save_shards({"a": torch.arange(6.0)}, tmp_path, SingleRank())
    again = {"a": torch.zeros(6)}
    load(again, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(again["a"], torch.arange(6.0))


def test_a_full_disk_is_an_os_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        save_shards({"a": torch.zeros(2**20)}, tmp_path, SingleRank())


def test_a_name_that_was_not_saved_is_refused(tmp_path: Path) -> None:
    save_shards({"a": torch.zeros(1)}, tmp_path, SingleRank())
    with pytest.raises(OSError, match="Missing key in checkpoint state_dict: b"):
        load_shards({"b": torch.zeros(1)}, tmp_path, SingleRank())
    with pytest.raises(OSError, match="Size mismatch"):
        load_shards({"a": torch.zeros(2)}, tmp_path, SingleRank())


def test_nothing_is_executed_when_the_table_of_contents_is_read(tmp_path: Path) -> None:
    trapped = tmp_path / "trapped"
    (tmp_path / METADATA).write_bytes(pickle.dumps(Trap(trapped)))
    with pytest.raises(OSError, match=r"posix\.mkdir does not belong in it"):
        read_saved_names(tmp_path)
    assert not trapped.exists()


class PicklerOfPython3112(pickle.Pickler):
    """Pickles members of enums as the first releases of Python 3.11 do."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def test_a_checkpoint_that_an_early_python_3_11_wrote_is_read(tmp_path: Path) -> None:
    save_shards({"a": torch.arange(6.0)}, tmp_path, SingleRank())
    contents = pickle.loads((tmp_path / METADATA).read_bytes())  # noqa: S301 - just written
    with (tmp_path / METADATA).open("wb") as stream:
        PicklerOfPython3112(stream).dump(contents)
    assert b"getattr" in (tmp_path / METADATA).read_bytes()
    again = {"a": torch.zeros(6)}
    load_shards(again, tmp_path, SingleRank())
    assert torch.equal(again["a"], torch.arange(6.0))


def test_an_attribute_of_anything_but_an_enum_is_not_read(tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(b"cbuiltins\ngetattr\n(ctorch\nSize\nV__class__\ntR.")
    with pytest.raises(OSError, match=r"an attribute of <class 'torch\.Size'> does not belong"):
        read_saved_names(tmp_path)


@pytest.mark.parametrize("kind", ["path", "link"])
def test_a_checkpoint_names_no_file_outside_its_directory(tmp_path: Path, kind: str) -> None:
    inside, outside = tmp_path / "state_1", tmp_path / "other.distcp"
    inside.mkdir()
    save_shards({"a": torch.arange(6.0)}, inside, SingleRank())
    (inside / "__0_0.distcp").rename(outside)
    if kind == "link":
        (inside / "__0_0.distcp").symlink_to(outside)
    else:
        contents = pickle.loads((inside / METADATA).read_bytes())  # noqa: S301 - just written
        for each in contents.storage_data.values():
            each.relative_path = "../other.distcp"
        (inside / METADATA).write_bytes(pickle.dumps(contents))
    with pytest.raises(OSError, match="no file of its directory"):
        load_shards({"a": torch.zeros(6)}, inside, SingleRank())


_METADATA_CLASS = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"not a pickle", pickle.dumps({"a": 1}), b"\x8c\x02\xff\xff.", b"(" * 10**6),
        _METADATA_CLASS + b")\x81.",
        _METADATA_CLASS + b"I1\n\x81.",
        b"ctorch.serialization\n_get_layout\n(Vnone\ntR.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.",  # bytes of an exabyte
    ],
)
def test_a_table_of_contents_that_is_none_is_an_os_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / METADATA).write_bytes(content)
    with pytest.raises(OSError, match=METADATA):
        read_saved_names(tmp_path)
