"""Draws the reward of two trainers over seconds of training, as a picture for a page.

    python benchmarks/trl/curve.py --peer runs/bench/trl.json --ours runs/bench/ours.json docs/images/curve.svg

It reads logs in the format of ``compare.py``. A point is the mean of five steps.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

WINDOW_STEPS: Final = 5
LEFT, RIGHT, TOP, BOTTOM = 56, 620, 24, 250
WIDTH, HEIGHT = 760, 300
STYLE: Final = """
    text { font: 13px system-ui, sans-serif; fill: #1f2328; }
    .middle { text-anchor: middle; }
    .end { text-anchor: end; }
    .grid { stroke: #d1d9e0; }
    .line { fill: none; stroke-width: 2.5; }
    .ours { stroke: #0969da; }
    .peer { stroke: #9a6700; }
    .ours-name { fill: #0969da; font-weight: 600; }
    .peer-name { fill: #9a6700; font-weight: 600; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .grid { stroke: #3d444d; }
      .ours { stroke: #58a6ff; }
      .peer { stroke: #d29922; }
      .ours-name { fill: #58a6ff; }
      .peer-name { fill: #d29922; }
    }
"""

Points = Sequence[tuple[float, float]]


def smooth(log: Sequence[dict[str, float]]) -> list[tuple[float, float]]:
    """Return seconds and mean reward of the last five steps, from the fifth step on."""
    return [
        (
            log[end - 1]["t_s"],
            statistics.fmean(record["reward"] for record in log[end - WINDOW_STEPS : end]),
        )
        for end in range(WINDOW_STEPS, len(log) + 1)
    ]


def draw(ours: Points, peer: Points, peer_name: str, title: str) -> str:
    """Return the picture as SVG. Rewards are between 0 and 1.

    Raises:
        ValueError: A side has fewer than ``WINDOW_STEPS`` steps.
    """
    if not ours or not peer:
        raise ValueError(f"each log needs at least {WINDOW_STEPS} steps")
    last_s = max(ours[-1][0], peer[-1][0])

    def place(t_s: float, reward: float) -> tuple[float, float]:
        x = LEFT + (RIGHT - LEFT) * t_s / last_s
        return round(x, 1), round(BOTTOM - (BOTTOM - TOP) * reward, 1)

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
            ' role="img" aria-labelledby="name">'
        ),
        f'  <title id="name">{escape(title)}</title>',
        f"  <style>{STYLE}  </style>",
    ]
    for tenths in range(0, 11, 2):
        _, y = place(0, tenths / 10)
        parts.append(f'  <line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'  <text class="end" x="{LEFT - 8}" y="{y + 4}">{tenths / 10:.1f}</text>')
    for t_s in range(0, int(last_s) + 1, 100):
        x, _ = place(t_s, 0)
        parts.append(f'  <text class="middle" x="{x}" y="{BOTTOM + 20}">{t_s}</text>')
    middle = (LEFT + RIGHT) // 2
    parts.append(
        f'  <text class="middle" x="{middle}" y="{BOTTOM + 42}">seconds of training</text>'
    )
    parts.append(f'  <text x="{LEFT}" y="{TOP - 10}">mean reward of {WINDOW_STEPS} steps</text>')
    for kind, name, points in (("peer", peer_name, peer), ("ours", "offbeat", ours)):
        places = [place(*point) for point in points]
        line = " ".join(f"{x},{y}" for x, y in places)
        x, y = places[-1]
        parts.append(f'  <polyline class="line {kind}" points="{line}"/>')
        parts.append(f'  <text class="{kind}-name" x="{x + 6}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Read the two logs and write the picture."""
    parser = argparse.ArgumentParser(description="Draw reward over seconds of two step logs.")
    parser.add_argument("--ours", type=Path, required=True)
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--peer-name", default="TRL")
    parser.add_argument("--title", default="Reward over seconds of training")
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    ours, peer = (smooth(json.loads(path.read_text())) for path in (arguments.ours, arguments.peer))
    arguments.picture.write_text(draw(ours, peer, arguments.peer_name, arguments.title))


if __name__ == "__main__":
    main()
