"""The picture of ``benchmarks/trl/curve.py``, on logs one can work out by hand."""

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

CURVE = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks/trl/curve.py"))
SVG = "{http://www.w3.org/2000/svg}"


def log(rewards: list[float], step_s: float) -> list[dict[str, float]]:
    return [{"t_s": step_s * (n + 1), "reward": reward} for n, reward in enumerate(rewards)]


def places(picture: str, kind: str) -> list[tuple[float, float]]:
    lines = ET.fromstring(picture).findall(f"{SVG}polyline")  # noqa: S314
    (line,) = [each for each in lines if kind in each.get("class", "").split()]
    return [
        (float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", line.get("points", ""))
    ]


def test_a_point_is_the_mean_of_five_steps_at_the_end_of_the_fifth() -> None:
    points = CURVE["smooth"](log([0.0, 0.0, 0.5, 0.5, 1.0, 1.0], step_s=2.0))
    assert points == [(10.0, pytest.approx(0.4)), (12.0, pytest.approx(0.6))]


def test_both_sides_share_their_axes() -> None:
    ours, peer = log([1.0] * 6, step_s=10.0), log([0.0] * 6, step_s=20.0)
    smooth = CURVE["smooth"]
    picture = CURVE["draw"](smooth(ours), smooth(peer), "TRL", "Reward")
    left, right, top, bottom = (CURVE[name] for name in ("LEFT", "RIGHT", "TOP", "BOTTOM"))
    assert places(picture, "peer")[-1] == (right, bottom)  # the slower side, reward 0
    assert places(picture, "ours")[-1] == ((left + right) / 2, top)  # in half the time, reward 1


def test_a_log_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 5 steps"):
        CURVE["draw"]([], [(1.0, 0.5)], "TRL", "Reward")
