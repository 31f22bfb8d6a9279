"""The package in ``examples/engine``, installed beside this one: its engine in runs of both runtimes."""

import json
from functools import partial
from pathlib import Path

import pytest

from offbeat.controller.events import Served
from offbeat.controller.journal import read_journal
from tests.support.installed_package import InstalledExample

PACKAGE = Path(__file__).parents[2] / "examples" / "engine"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> InstalledExample:
    return InstalledExample.install(PACKAGE, tmp_path_factory.mktemp("site"))


def test_its_own_test_proves_the_contract(plain: InstalledExample) -> None:
    done = plain.test()
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout


def test_a_recipe_of_it_is_checked_simulated_and_dried(
    plain: InstalledExample, tmp_path: Path
) -> None:
    assert "Everything is in order." in plain.offbeat("check", "recipe.yaml")
    assert "violations in 0 episodes" in plain.offbeat("simulate", "recipe.yaml", "--seeds", "5")
    plain.offbeat("dry-run", "recipe.yaml", "steps=2", f"run_dir={tmp_path / 'dry'}")
    done = plain.command("check", "recipe.yaml", "generator.sampling.top_p=0.9")
    assert (done.returncode, "sample by temperature alone" in done.stderr) == (2, True)


def test_its_name_and_its_keys_are_explained(plain: InstalledExample) -> None:
    named = plain.offbeat("config", "explain", "generator.backend")
    assert "Of installed packages: plain (offbeat-plain)." in named
    shown = plain.offbeat("config", "explain", "generator.threads")
    assert "Only with generator.backend=embedded or vllm or plain." in shown
    engines = plain.offbeat("config", "explain", "generator")
    assert "plain: Engines without a cache, to compare others with." in engines


def test_its_engine_serves_each_version_through_transaction_and_canary(
    plain: InstalledExample, tmp_path: Path, runtime: str
) -> None:
    run = tmp_path / "run"
    train = plain.command if runtime == "local" else partial(plain.python, "-m", "offbeat")
    for what in (
        ("recipe.yaml", f"runtime={runtime}", f"run_dir={run}", "steps=2"),
        ("--resume", run, "steps=4"),
    ):
        done = train("train", *what)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "agree" in plain.offbeat("replay", run)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # The controller refuses an ack without the canary's gap: what is served has passed it
    served = [each for each in read_journal(run / "journal") if isinstance(each, Served)]
    assert {each.version for each in served} >= {0, 1, 2, 3}
    assert all(each["off_policy/staleness_max"] <= 1 for each in records)
