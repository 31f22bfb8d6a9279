"""The HTML file: the page's own code and style, and the packed data. One request, its own.

Nothing of a run is HTML here but the title, which is escaped: data travels as base64 and enters
the document as text nodes. The content security policy names the one script and the one style by
digest, so markup that slipped through could neither run nor load anything.
"""

import base64
import hashlib
import html
from importlib.resources import files
from typing import Any, Final

from offbeat.plugins.report.packing import packed

_WEB: Final = files("offbeat.plugins.report") / "web"
SCRIPTS: Final = (
    "vendor/uPlot.iife.min.js",
    "dom.js",
    "data.js",
    "state.js",
    "charts.js",
    "cards.js",
    "timeline.js",
    "heat.js",
    "panels.js",
    "groups.js",
    "story.js",
    "compare.js",
    "metrics.js",
    "main.js",
)
"""Scripts in the order of the page: later files use names of earlier ones."""
STYLES: Final = ("vendor/uPlot.min.css", "page.css")


def page(facts: dict[str, Any]) -> str:
    """Return the page of ``document.document``'s tree as one HTML file."""
    title = ", ".join(f"{run['name']} ({run['run_id']})" for run in facts["runs"])
    script, style = script_text(), style_text()
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)} · offbeat</title>\n<style>{style}</style></head>\n"
        f"{body_text()}\n"
        f'<script type="text/plain" id="data">{packed(facts)}</script>\n'
        f"<script>{script}</script></body></html>\n"
    )


def script_text() -> str:
    """Return the page's code, all files as one script."""
    return "\n".join(read_web(name).rstrip() for name in SCRIPTS) + "\n"


def style_text() -> str:
    """Return the page's style."""
    return "\n".join(read_web(name).rstrip() for name in STYLES) + "\n"


def body_text() -> str:
    """Return the body's open tag and its sections, which the scripts fill."""
    return read_web("body.html").rstrip()


def read_web(name: str) -> str:
    """Return a file of the page's code or style."""
    return (_WEB / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
