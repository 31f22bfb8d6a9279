"""Commands on a local run whose engine decodes with the trainer's own weights."""

from pathlib import Path

from tests.support.live_run import offbeat
from tests.support.shared_weight_runs import RECIPE
from tests.support.starting import make_start

SETTINGS = (
    "generator.share_weights=true",
    "steps=2000",
    "groups_per_step=4",
    "samples_per_group=4",
    "checkpoint.interval=1",
)


def test_the_weights_that_a_live_run_shares_are_those_of_its_checkpoint(tmp_path: Path) -> None:
    with make_start(tmp_path, "local", is_warm=True)("run", RECIPE, *SETTINGS) as run:
        run.trained_steps(3)
        assert offbeat("control", run.run_dir, "pause")[0] == 0
        run.logged("run.command")

        def legs() -> list[str]:
            _, text = offbeat("verify-weights", run.run_dir, "--engine")
            lines = [line for line in text.splitlines() if "generator-0, version" in line]
            return [line.split(": ", 1)[-1] for line in lines]

        # The step in progress ends, and its checkpoint is written
        run.until("the engine has its weights", lambda: legs() == ["equal", "equal"])
        assert offbeat("control", run.run_dir, "stop")[0] == 0
        assert run.exit_code(within_s=180) == 0
        run.nothing_is_left()
    for command in ("replay", "report", "verify-weights"):
        code, text = offbeat(command, run.run_dir)
        assert code == 0, text
