"""What ``offbeat stage`` refuses before it asks the hub, and how it says so."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.launch.commands.main import app
from offbeat.messages.exit_codes import REFUSED


def refusal(*args: str) -> str:
    done = CliRunner().invoke(app, ["stage", *args])
    assert done.exit_code == REFUSED
    return done.stderr


@pytest.mark.parametrize("what", ["recipes/quickstart.yaml", "/no/such/directory", "one", "a/b/c"])
def test_only_models_of_the_hub_are_staged_and_rsync_copies_a_directory(what: str) -> None:
    said = refusal(what, "--to", "/local/m")
    assert f"{what}: `offbeat stage` downloads one model of the hub, named OWNER/NAME" in said
    assert "rsync -a DIRECTORY/ MACHINE:/local/m/" in said


def test_a_directory_with_the_form_of_a_name_is_not_taken_for_a_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models/mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "models/mine: `offbeat stage` downloads" in refusal("models/mine", "--to", "/local/m")


def test_settings_and_parts_of_a_recipe_are_refused() -> None:
    assert "a/b steps=1: `offbeat stage`" in refusal("a/b", "steps=1", "--to", "/local/m")
    said = refusal("a/b", "--part", "weights", "--to", "/local/m")
    assert "a/b --part weights: `offbeat stage` downloads one model of the hub" in said


def test_a_target_that_depends_on_the_working_directory_is_refused() -> None:
    assert "--to local/m: it is relative. Write it from / on" in refusal("a/b", "--to", "local/m")
