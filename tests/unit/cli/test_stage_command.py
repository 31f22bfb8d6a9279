"""What ``offbeat stage`` refuses before it starts Ray, and how it says so."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.launch.stage import awaited
from offbeat.messages.exit_codes import REFUSED
from offbeat.staging.manifest import SourceStalled


def model_of(directory: Path, *names: str) -> str:
    directory.mkdir()
    for name in names:
        (directory / name).write_text("{}")
    return str(directory)


def refusal(*args: str) -> str:
    done = CliRunner().invoke(app, ["stage", *args])
    assert done.exit_code == REFUSED
    return done.stderr


def test_weights_that_are_pickles_are_refused(tmp_path: Path) -> None:
    pickled = model_of(tmp_path / "m", "config.json", "pytorch_model.bin")
    said = refusal(pickled, "--to", "/local/m")
    assert "its weights are pickles (pytorch_model.bin), which run code when they are" in said


def test_a_recipe_stages_its_model(tmp_path: Path) -> None:
    model_of(tmp_path / "m", "config.json")
    recipe = tmp_path / "r.yaml"
    recipe.write_text("steps: 1\nmodel: {path: other}\n")
    said = refusal(str(recipe), f"model.path={tmp_path}/m", "--to", "/local/m")
    assert f"{tmp_path}/m: it has no *.safetensors" in said


@pytest.mark.parametrize("part", ["weights", "teacher"])
def test_a_recipe_stages_its_weights_and_its_teacher_by_name(tmp_path: Path, part: str) -> None:
    model_of(tmp_path / "m", "config.json", "a.safetensors")
    model_of(tmp_path / part, "old.bin", "config.json")
    recipe = tmp_path / "r.yaml"
    loss = f", algorithm: {{loss: {{teacher: {part}}}}}"
    text = f"{{steps: 1, model: {{path: m, weights: weights}}{loss if part == 'teacher' else ''}}}"
    recipe.write_text(text)
    said = refusal(str(recipe), "--part", part, "--to", "/local/p")
    assert f"{tmp_path / part}: its weights are pickles (old.bin)" in said


def test_a_part_that_a_recipe_does_not_name_is_refused_by_its_key(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("steps: 1\nmodel: {path: m}\n")
    for part, key in (("weights", "model.weights"), ("teacher", "algorithm.loss.teacher")):
        said = refusal(str(recipe), "--part", part, "--to", "/local/p")
        assert f"it sets no {key}. Set it, or leave --part out" in said
    model = model_of(tmp_path / "m", "config.json", "a.safetensors")
    assert "--part goes with a recipe" in refusal(model, "--part", "weights", "--to", "/local/m")


def test_a_target_that_depends_on_the_working_directory_is_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path / "m", "config.json", "a.safetensors")
    assert "--to local/m: it is relative. Write it from / on" in refusal(model, "--to", "local/m")


@pytest.mark.parametrize("name", ["/no/such/directory", "one-word", "a/b/c"])
def test_a_name_that_is_neither_a_directory_nor_of_the_hub_is_refused(name: str) -> None:
    assert f"{name}: there is no such directory. Name a recipe" in refusal(name, "--to", "/local/m")


def test_settings_without_a_recipe_are_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path / "m", "config.json", "a.safetensors")
    assert "settings go with a recipe" in refusal(model, "steps=1", "--to", "/local/m")


STALLED = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
from offbeat.cli.stage import refuse_at_once
from offbeat.staging.manifest import SourceStalled

begun = threading.Event()

def download():
    with ThreadPoolExecutor(1) as pool:  # as the hub's client
        pool.submit(lambda: (begun.set(), time.sleep(3600)))

threading.Thread(target=download, daemon=True).start()
begun.wait()
print("so far")
refuse_at_once(SourceStalled("download of a/b", "no byte moved for 1 s", "Stage again"))
"""


def test_a_download_that_stands_still_does_not_keep_the_process_that_gave_it_up() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STALLED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == REFUSED
    assert done.stdout == "so far\n"
    assert done.stderr == "download of a/b: no byte moved for 1 s. Stage again\n"


def test_what_stands_still_on_this_machine_is_told_from_what_cannot_be_staged() -> None:
    ends = threading.Event()
    with pytest.raises(SourceStalled, match="no byte moved for 0 s"):
        awaited(lambda _: ends.wait(60), "download of a/b", 0.0, print)
    ends.set()
