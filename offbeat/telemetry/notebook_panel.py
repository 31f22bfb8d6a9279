"""Status of a run in a notebook: one output that is replaced, with the curve of the reward."""

from collections.abc import Sequence
from html import escape
from typing import Any, Final

from offbeat.telemetry.status_file import Status

_WIDTH, _HEIGHT = 480, 110
_MOST_POINTS: Final = 240
Point = tuple[int, float]  # step, and its reward or loss


class NotebookPanel:
    """Shows each status in the output of the cell that started the run."""

    def __init__(self) -> None:
        self._points = list[Point]()
        self._output: Any = None

    def start(self) -> None:
        from IPython.display import HTML, display  # type: ignore[import-not-found] # noqa: PLC0415

        self._html = HTML
        self._output = display(HTML("starting"), display_id=True)

    def stop(self) -> None:
        """Leave the last status in the notebook."""

    def show(self, status: Status) -> None:
        self._points = with_point(self._points, status)
        if self._output is not None:
            self._output.update(self._html(as_html(status, self._points)))


def with_point(points: list[Point], status: Status) -> list[Point]:
    """Return the curve with the status's point; of a long one every second point remains."""
    value = status.reward if status.loss is None else status.loss
    if value is None or (points and points[-1][0] >= status.step):
        return points
    kept = points[::2] if len(points) >= _MOST_POINTS else points
    return [*kept, (status.step, value)]


def as_html(status: Status, points: Sequence[Point]) -> str:
    """Return a bar, one line of figures and the curve."""
    name = "reward" if status.loss is None else "loss"
    value = f"{points[-1][1]:.3f}" if points else "-"
    speed = "-" if status.samples_per_s is None else f"{status.samples_per_s:,.0f}"
    parts = [f"step {status.step}/{status.steps}", f"{name} {value}", f"{speed} samples/s"]
    if status.staleness_max is not None:
        parts.append(f"staleness at most {status.staleness_max}")
    parts += [status.phase]
    parts += [f"waiting for {status.waiting_for}"] if status.waiting_for else []
    bar = (
        f'<progress value="{status.step}" max="{status.steps}" style="width:{_WIDTH}px"></progress>'
    )
    return f"<div>{bar}<br><code>{escape(' | '.join(parts))}</code><br>{_curve(points, name)}</div>"


def _curve(points: Sequence[Point], name: str) -> str:
    """Return the points as a picture; nothing for less than two."""
    if len(points) < 2:  # noqa: PLR2004 -- a line needs two
        return ""
    first, last = points[0][0], points[-1][0]
    low, high = min(y for _, y in points), max(y for _, y in points)
    across, up = (_WIDTH - 10) / (last - first), (_HEIGHT - 30) / ((high - low) or 1.0)
    line = " ".join(
        f"{5 + (x - first) * across:.1f},{_HEIGHT - 15 - (y - low) * up:.1f}" for x, y in points
    )
    label = f"{name} of steps {first} to {last}: from {low:.3f} to {high:.3f}"
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{label}">'
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
        f'<text x="5" y="11" font-size="10" fill="currentColor">{label}</text></svg>'
    )
