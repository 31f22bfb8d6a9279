"""Displays a run in progress: a live panel on a terminal, an occasional line elsewhere.

In a notebook, each status replaces the output of the cell, which includes the reward curve.
"""

import time
from collections.abc import Callable, Sequence
from html import escape
from types import TracebackType
from typing import Any, Final, Self

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from offbeat.telemetry.applied_steps import WINDOW_STEPS
from offbeat.telemetry.charts import bar, sparkline
from offbeat.telemetry.status_file import IncidentLine, Status, StatusFile
from offbeat.telemetry.summary import duration

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
        """Keep the last status in the notebook."""

    def show(self, status: Status) -> None:
        self._points = with_point(self._points, status)
        if self._output is not None:
            self._output.update(self._html(as_html(status, self._points)))


def with_point(points: list[Point], status: Status) -> list[Point]:
    """Return the curve with the status's point added. Of a long curve, keep every second point."""
    value = status.reward if status.loss is None else status.loss
    if value is None or (points and points[-1][0] >= status.step):
        return points
    kept = points[::2] if len(points) >= _MOST_POINTS else points
    return [*kept, (status.step, value)]


def as_html(status: Status, points: Sequence[Point]) -> str:
    """Return the bar, one line of figures and the curve as HTML."""
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
    """Return the points as a picture, or nothing for fewer than two points."""
    if len(points) < 2:  # noqa: PLR2004 -- a line needs two
        return ""
    first, last = points[0][0], points[-1][0]
    low, high = min(y for _, y in points), max(y for _, y in points)
    across, up = (_WIDTH - 10) / (last - first), (_HEIGHT - 30) / ((high - low) or 1.0)
    line = " ".join(
        f"{5 + (x - first) * across:.1f},{_HEIGHT - 15 - (y - low) * up:.1f}" for x, y in points
    )
    mean = f", mean over up to {WINDOW_STEPS} steps" if name == "reward" else ""
    label = f"{name} of steps {first} to {last}{mean}: from {low:.3f} to {high:.3f}"
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{label}">'
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
        f'<text x="5" y="11" font-size="10" fill="currentColor">{label}</text></svg>'
    )


_BAR: Final = 30
_PLAIN_EVERY_S: Final = 10.0  # seconds between two lines of an output other than a terminal


class ProgressDisplay:
    """Context manager that shows each ``Status`` passed to it.

    With a ``file``, the status is also written to this file. Without a panel, a line is printed
    every ``plain_every_s`` seconds, at a new phase, and for the last step.
    """

    def __init__(
        self,
        console: Console,
        file: StatusFile | None = None,
        *,
        plain_every_s: float = _PLAIN_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file
        self._console, self._clock, self._plain_every_s = console, clock, plain_every_s
        self._panel = _make_panel(console)
        self.phase = "starting"  # phase of the last status
        self._latest: Status | None = None
        self._shown: Status | None = None  # status of the last printed line
        self._shown_at = clock()
        self._last_incident = 0

    def __enter__(self) -> Self:
        if self._panel is not None:
            self._panel.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._panel is not None:
            self._panel.stop()

    def update(self, status: Status) -> None:
        """Show the status, if it is due."""
        self.phase, self._latest = status.phase, status
        if self._file is not None:
            self._file.update(status)
        self._print_incidents(status.incidents)
        if self._panel is not None:
            self._panel.show(status)
        elif self._is_due(status):
            self._print(line(status))
            self._shown = status

    def wait(self, waiting_for: str) -> None:
        """Show the reason for waiting while the controller reports no status."""
        if self._panel is not None:
            if self._latest is not None:
                self._panel.show(msgspec.structs.replace(self._latest, waiting_for=waiting_for))
        elif self._is_time:
            self._print(f"{self.phase}: waiting for {waiting_for}")

    def _print_incidents(self, incidents: Sequence[IncidentLine]) -> None:
        """Print a line for each new incident, above the panel if there is one."""
        if incidents and incidents[-1].number < self._last_incident:
            self._write("the controller was replaced")
            self._last_incident = 0
        new = [each for each in incidents if each.number > self._last_incident]
        if not new:
            return
        if (missed := new[0].number - self._last_incident - 1) > 0:
            self._write(f"{missed} more incidents: see offbeat report")
        for each in new:
            self._write(f"incident at step {each.step}: {each.text}")
        self._last_incident = new[-1].number

    def _print(self, text: str) -> None:
        self._write(text)
        self._shown_at = self._clock()

    def _write(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _is_due(self, status: Status) -> bool:
        shown = self._shown
        if shown is None or self._is_time or status.step == status.steps != shown.step:
            return True
        # Every sync is a phase, so a line for each sync would be a line per step.
        return status.phase != shown.phase and "syncing" not in (status.phase, shown.phase)

    @property
    def _is_time(self) -> bool:
        return self._clock() - self._shown_at >= self._plain_every_s


def _make_panel(console: Console) -> "TerminalPanel | NotebookPanel | None":
    """Return the panel for a terminal or a notebook, or None to print lines instead."""
    if console.quiet:
        return None
    if console.is_jupyter:
        return NotebookPanel()
    return TerminalPanel(console) if console.is_terminal else None


class TerminalPanel:
    """A few rows at the cursor, which disappear when the display stops."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def show(self, status: Status) -> None:
        self._live.update(panel(status), refresh=True)


def line(status: Status) -> str:
    """Format the status as one line, for logs and pipes."""
    parts = [f"step {status.step}/{status.steps}", f"reward {_number(status.reward, '.3f')}"]
    if status.loss is not None:
        parts[1] = f"loss {status.loss:.3f}"
    parts += [f"evaluation {scores}"] if (scores := _scores(status)) else []
    parts += [time] if (time := _time(status)) else []
    if status.staleness_mean is not None:
        parts.append(f"staleness {status.staleness_mean:.1f} (max {status.staleness_max})")
    parts += [
        f"ready {status.ready} in flight {status.in_flight}",
        f"busy trainer {_percent(status.trainer_busy)} generators {_percent(status.generator_busy)}",
        f"{_number(status.samples_per_s, ',.0f')} samples/s",
    ]
    parts += [status.verdict] if status.verdict else []
    parts += [f"{status.phase}: waiting for {status.waiting_for}"] if status.waiting_for else []
    return " | ".join(parts)


def panel(status: Status) -> RenderableType:
    """Format the status as a few rows, for a terminal."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    done = status.step / status.steps if status.steps else 0.0
    recent, reward = sparkline(status.reward_recent), _number(status.reward, ".3f")
    mean, most = _number(status.staleness_mean, ".2f"), _number(status.staleness_max, "d")
    trainer, engines = _percent(status.trainer_busy), _percent(status.generator_busy)
    time, scores = _time(status), _scores(status)
    rows: dict[str, str | Text] = {
        "step": Text.assemble((bar(done, _BAR), "green"), f" {status.step}/{status.steps}"),
        **({"time": time} if time else {}),
        "reward": Text.assemble((recent, "green"), f" {reward}"),
        **({"evaluation": Text(scores)} if scores else {}),
        "staleness": f"mean {mean}  max {most}",
        "groups": f"{status.ready} ready  {status.in_flight} in flight",
        "busy": f"trainer {trainer}  generators {engines}",
        "speed": f"{_number(status.samples_per_s, ',.0f')} samples/s",
        "state": Text(_state(status)),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _state(status: Status) -> str:
    balanced = status.verdict in {"", "balanced"}
    parts = [status.phase, status.verdict if balanced else f"bottleneck: {status.verdict}"]
    parts += [f"waiting for {status.waiting_for}"] if status.waiting_for else []
    return ", ".join(part for part in parts if part)


def _time(status: Status) -> str:
    """Return the time since the run began and, if known, the time left at its mean speed."""
    if status.elapsed_s is None:
        return ""
    elapsed = f"{duration(status.elapsed_s)} elapsed"
    return elapsed if status.left_s is None else f"{elapsed}, about {duration(status.left_s)} left"


def _scores(status: Status) -> str:
    """Return the mean rewards of the newest evaluation, or nothing before the first."""
    if not status.scores:
        return ""
    named = (f"{name} {score:.3f}".strip() for name, score in status.scores.items())
    return f"{', '.join(named)} at version {status.scored_version}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.0%}"
