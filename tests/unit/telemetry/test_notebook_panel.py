"""The panel of a notebook shows figures and the curve of a run."""

import re

from offbeat.telemetry.progress import Point, as_html, with_point
from offbeat.telemetry.status_file import Status


def status(step: int, reward: float | None = 0.5, **more: object) -> Status:
    return Status(step=step, steps=1000, phase="running", reward=reward, **more)  # type: ignore[arg-type]


def test_the_curve_goes_through_every_step_that_was_seen() -> None:
    points = list[Point]()
    for step in (0, 1, 1, 5):
        points = with_point(points, status(step, step / 10 if step else None))
    assert points == [(1, 0.1), (5, 0.5)]
    html = as_html(status(5), points)
    assert "reward of steps 1 to 5, mean over up to 20 steps: from 0.100 to 0.500" in html
    assert re.search(r'points="5\.0,95\.0 475\.0,15\.0"', html)


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    points = list[Point]()
    for step in range(1, 1001):
        points = with_point(points, status(step))
    assert len(points) <= 240
    assert (points[0][0], points[-1][0]) == (1, 1000)


def test_a_run_of_demonstrations_shows_its_loss() -> None:
    with_loss = status(3, None, loss=2.0)
    assert "loss 2.000" in as_html(with_loss, with_point([], with_loss))
    curve = as_html(with_loss, with_point([(2, 1.0)], with_loss))
    assert "loss of steps 2 to 3: from 1.000 to 2.000" in curve, "of each step, not a mean"


def test_text_of_a_run_is_escaped() -> None:
    assert "&lt;b&gt;" in as_html(status(1, waiting_for="<b>"), [])
