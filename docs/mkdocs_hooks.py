"""Hooks of ``mkdocs.yml``: pages from outside of ``docs/``, and links that lead out of it.

A page links to sources as it does in the repository (``../offbeat/launch/commands/main.py``). In the site such a
link goes below ``SOURCE_URL`` of the environment, the address of the sources at one commit; without
it the text stands alone. A link to what does not exist is left as it is, and fails the strict build.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "docs"
PAGES: Final = {
    ROOT / "README.md": "index.md",
    ROOT / "ARCHITECTURE.md": "architecture.md",
    ROOT / "CONTRIBUTING.md": "contributing.md",
    ROOT / "CHANGELOG.md": "changelog.md",
    ROOT / "SECURITY.md": "security.md",
    ROOT / "ROADMAP.md": "roadmap.md",
    ROOT / "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    DOCS / "decisions": "decisions/index.md",
}
"""Pages that are not in ``docs/`` under their name, and the name that they have in the site."""

SEARCHED_FIRST: Final = ("commands.md", "configuration.md")
"""Pages that explain a name; the search shows them before pages that mention it."""

_LINK: Final = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
_TEXT: Final = re.compile(r"(?<=>)[^<]+(?=<)")
_CELL: Final = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
_FENCE: Final = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:  # noqa: ANN401 - mkdocs calls it so
    """Add the pages of the root, and a list of the decisions."""
    for source, name in PAGES.items():
        text = _decisions(source) if source.is_dir() else source.read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:  # noqa: ANN401 - mkdocs calls it so
    """Rewrite the links of a page for its place in the site."""
    name = page.file.src_uri
    if name in SEARCHED_FIRST:
        page.meta["search"] = {"boost": 4}
    source = next((path for path, own in PAGES.items() if own == name), DOCS / name)
    folder = source if source.is_dir() else source.parent
    parts = _FENCE.split(markdown)
    return "".join(
        part if part.startswith("```") else _LINK.sub(lambda each: _link(each, folder, name), part)
        for part in parts
    )


def on_post_page(output: str, **_: Any) -> str:  # noqa: ANN401 - mkdocs calls it so
    """Let names in a table's cell break after a dot, a slash, a dash or an underscore."""
    return _CELL.sub(lambda cell: _TEXT.sub(_breakable, cell.group()), output)


def _breakable(text: re.Match[str]) -> str:
    return re.sub(r"(?<=\w)([./_=(-]+)(?=[^\W\d_])", r"\1<wbr>", text.group())


def _link(found: re.Match[str], folder: Path, name: str) -> str:
    """Return the link as the page ``name`` of the site has it."""
    text, target = found.groups()
    path, mark, anchor = target.partition("#")
    there = (folder / path).resolve()
    if not path or "://" in path or not there.exists():
        return found.group()
    if there in PAGES or (there.is_relative_to(DOCS) and there.is_file()):
        own = PAGES[there] if there in PAGES else there.relative_to(DOCS).as_posix()
        return f"[{text}]({posixpath.relpath(own, posixpath.dirname(name) or '.')}{mark}{anchor})"
    url = os.environ.get("SOURCE_URL", "").rstrip("/")
    return f"[{text}]({url}/{there.relative_to(ROOT).as_posix()}{mark}{anchor})" if url else text


def _decisions(folder: Path) -> str:
    """Return a page that lists the decisions by title."""
    lines = [
        "# Decisions",
        "",
        "Decisions that somebody would ask about again. Numbers have gaps.",
        "",
    ]
    for path in sorted(folder.glob("*.md")):
        title = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join([*lines, ""])
