"""W&B as a tracker: where it goes online, and when it writes nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from offbeat.messages.finding import Finding, Level
from offbeat.plugins.wandb.plugin import TRACKER
from offbeat.plugins.wandb.section import WandbConfig
from offbeat.telemetry.tracker import TrackedRun


def one(section: WandbConfig, environ: Mapping[str, str]) -> Finding:
    (finding,) = TRACKER.check(section, environ)
    return finding


@pytest.mark.parametrize(
    ("mode", "environ", "level", "message"),
    [
        ("disabled", {}, Level.OK, "disabled"),
        ("offline", {}, Level.OK, "offline"),
        ("auto", {}, Level.OK, "offline"),
        ("auto", {"WANDB_API_KEY": "canary"}, Level.OK, "online"),
        ("auto", {"WANDB_MODE": "disabled"}, Level.OK, "disabled by WANDB_MODE"),
        ("online", {"WANDB_API_KEY": "canary"}, Level.OK, "online"),
        ("online", {}, Level.ERROR, "no API key was found"),
    ],
)
def test_wandb_goes_online_only_with_a_key(
    tmp_path: Path, mode: Any, environ: dict[str, str], level: Level, message: str
) -> None:
    pytest.importorskip("wandb")
    finding = one(WandbConfig(mode=mode), {"HOME": str(tmp_path), **environ})
    assert finding.level is level
    assert message in finding.message
    assert "canary" not in str(finding)


def test_a_login_in_netrc_is_a_key(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password canary")
    assert one(WandbConfig(mode="online"), {"HOME": str(tmp_path)}).level is Level.OK


def test_a_disabled_tracker_writes_nothing(tmp_path: Path) -> None:
    run = TrackedRun("r", "n", tmp_path, {})
    assert TRACKER.make_sink(WandbConfig(mode="disabled"), run) is None
    assert TRACKER.make_sink(WandbConfig(mode="offline"), run) is not None


def test_dry_runs_and_evaluations_reach_no_server() -> None:
    modes = get_args(WandbConfig.model_fields["mode"].annotation)
    for section in (WandbConfig(mode=mode) for mode in modes):
        disabled = section.mode == "disabled"
        assert TRACKER.for_dry_run(section) == {"mode": "disabled" if disabled else "offline"}
        assert TRACKER.for_evaluation(section) == {"mode": "disabled"}
