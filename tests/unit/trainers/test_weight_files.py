"""Files of weights that are written as the weights come."""

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from offbeat.trainers.checkpoints.weight_files import replace_directory, write_weights

INDEX = "model.safetensors.index.json"
BOUND = 400
SIZES = {"a": 60, "b": 30, "c": 30, "large": 200, "d": 10, "e": 80, "f": 20}  # float32 numbers


class CountedSource:
    """New tensors one by one; knows how many bytes of them are held when another is made."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self._sizes = sizes
        self.most_held = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        made = list["weakref.ref[Tensor]"]()
        for number, (name, size) in enumerate(self._sizes.items()):
            self.most_held = max(self.most_held, sum(map(nbytes_of, made)))
            tensor = torch.full((size,), float(number))
            made.append(weakref.ref(tensor))
            yield name, tensor
            del tensor


def nbytes_of(reference: "weakref.ref[Tensor]") -> int:
    held = reference()
    return 0 if held is None else held.nbytes


def test_files_have_at_most_so_many_bytes_and_an_index_names_where_each_tensor_is(
    tmp_path: Path,
) -> None:
    write_weights(CountedSource(SIZES), tmp_path, BOUND)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * sum(SIZES.values())
    assert index["weight_map"] == {
        "a": "model-00001-of-00005.safetensors",
        "b": "model-00001-of-00005.safetensors",
        "c": "model-00002-of-00005.safetensors",
        "large": "model-00003-of-00005.safetensors",
        "d": "model-00004-of-00005.safetensors",
        "e": "model-00004-of-00005.safetensors",
        "f": "model-00005-of-00005.safetensors",
    }
    files = {name: load_file(tmp_path / name) for name in set(index["weight_map"].values())}
    assert {each.name for each in tmp_path.iterdir()} == {INDEX, *files}
    for name, tensor in CountedSource(SIZES):
        assert torch.equal(files[index["weight_map"][name]][name], tensor)


def test_no_more_than_the_tensors_of_one_file_are_held(tmp_path: Path) -> None:
    small = {f"layer {number}": 25 for number in range(40)}
    source = CountedSource(small)
    write_weights(source, tmp_path, BOUND)
    assert len(list(tmp_path.glob("*.safetensors"))) == 10
    assert source.most_held == BOUND


def test_weights_that_fit_one_file_have_no_index(tmp_path: Path) -> None:
    write_weights(CountedSource(SIZES), tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]
    assert load_file(tmp_path / "model.safetensors").keys() == SIZES.keys()


def test_a_directory_whose_writing_was_cut_off_holds_nothing_that_a_reader_takes_for_weights(
    tmp_path: Path,
) -> None:
    def cut_off() -> Iterator[tuple[str, Tensor]]:
        for number, each in enumerate(CountedSource(SIZES)):
            if number == 5:
                raise KeyboardInterrupt
            yield each

    with pytest.raises(KeyboardInterrupt):
        write_weights(cut_off(), tmp_path, BOUND)
    written = [each.name for each in tmp_path.iterdir()]
    assert len(written) == 3
    assert not [each for each in written if "safetensors" in each]


def test_what_a_killed_process_left_of_a_directory_is_removed_by_the_next_one(
    tmp_path: Path,
) -> None:
    like = tmp_path / "model"
    like.mkdir()
    left, other = tmp_path / "runs/.step_1.abcd1234", tmp_path / "runs/.step_12.abcd1234"
    for each in (left, other):
        each.mkdir(parents=True)
        (each / "model-00000.unfinished").write_bytes(b"half")
    with replace_directory(tmp_path / "runs/step_1", like) as staged:
        write_weights(CountedSource(SIZES), staged)
    assert {each.name for each in (tmp_path / "runs").iterdir()} == {"step_1", other.name}
