"""The site of the pages: nothing is cut off, dead, or fetched, and search finds names."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
DESKTOP, PHONE = (1280, 900), (390, 844)
FETCHED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}
COMMANDS = re.findall(r"^## (offbeat .+)$", (ROOT / "docs/commands.md").read_text(), re.MULTILINE)
KEYS = re.findall(r"^- `([\w.]+)`", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE)

_CUT_CELLS = """
() => [...document.querySelectorAll("article td, article th")].flatMap(cell => {
  const right = Math.ceil(cell.getBoundingClientRect().right) - 1;
  const inner = cell.scrollWidth > cell.clientWidth + 1;
  for (let box = cell.parentElement; box; box = box.parentElement) {
    const overflow = getComputedStyle(box).overflowX;
    if (overflow === "auto" || overflow === "scroll") break;  // a reader can scroll to it
    if (overflow === "visible") continue;
    if (right > box.getBoundingClientRect().right) return [cell.innerText.slice(0, 60)];
  }
  return inner ? [cell.innerText.slice(0, 60)] : [];
})
"""

_TABLES_THAT_SCROLL = """
() => [...document.querySelectorAll(".md-typeset__scrollwrap")].map(
  wrap => wrap.scrollWidth > wrap.clientWidth + 1
)
"""


class _Page(HTMLParser):
    """Links, anchors and fetched addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.anchors, self.fetched = list[str](), set[str](), list[str]()
        self.has_mermaid = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.has_mermaid |= "mermaid" in given.get("class", "")
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif given.get(FETCHED.get(tag, "")):
            self.fetched.append(given[FETCHED[tag]])


@pytest.fixture(scope="module")
def parsed(site: Path) -> dict[Path, _Page]:
    """Every page of the site."""
    return {path: _Page(path.read_text(encoding="utf-8")) for path in html_pages(site)}


def html_pages(site: Path) -> list[Path]:
    """The pages. 404.html is left out: its addresses begin at the root of a server."""
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def test_every_page_of_the_repository_is_in_the_site(site: Path) -> None:
    names = {path.relative_to(site).with_suffix("").as_posix() for path in html_pages(site)}
    pages = {
        path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
    }
    assert pages - names == set()


def test_no_link_of_the_site_is_dead(site: Path, parsed: dict[Path, _Page]) -> None:
    dead, count = list[str](), 0
    for path, page in parsed.items():
        for link in [*page.links, *page.fetched]:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            count += 1
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            known = parsed[target].anchors if target in parsed else None
            is_dead = not target.is_file() or (
                address.fragment and known is not None and unquote(address.fragment) not in known
            )
            dead += [f"{path.relative_to(site)}: {link}"] if is_dead else []
    assert count > 3000
    assert dead == []


def test_no_page_or_style_fetches_from_another_host(site: Path, parsed: dict[Path, _Page]) -> None:
    foreign = {
        f"{path.relative_to(site)}: {address}"
        for path, page in parsed.items()
        for address in page.fetched
        if urlsplit(address).netloc
    }
    assert foreign == set()
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"url\(['\"]?(?:https?:)?//[^)]*|@import[^;]*", styles) == []
    # The theme's script fetches mermaid where a page has a figure of it.
    assert [path for path, page in parsed.items() if page.has_mermaid] == []


def test_search_has_each_command_as_a_title_and_each_key_in_its_section(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    titles = {re.sub(r"<[^>]+>", "", entry["title"]) for entry in index["docs"]}
    assert set(COMMANDS) - titles == set()
    sections = [
        entry["text"]
        for entry in index["docs"]
        if entry["location"].startswith("configuration.html#")
    ]
    assert len(KEYS) > 200
    missing = [
        key for key in KEYS if sum(f"<code>{key}</code> (" in each for each in sections) != 1
    ]
    assert missing == []


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_page_fits_cuts_no_column_and_fetches_from_the_site_only(
    site_browser: Any, site: Path, size: tuple[int, int]
) -> None:
    width, height = size
    context = site_browser.new_context(viewport={"width": width, "height": height})
    page = context.new_page()
    requests, messages, faults = list[str](), list[str](), list[str]()
    scrolls = list[bool]()
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: messages.append(str(error)))
    for path in html_pages(site):
        page.goto(path.as_uri())
        page.wait_for_function(
            "[...document.querySelectorAll('article table')].every(t => t.closest('.md-typeset__table'))"
        )
        sideways = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        cut = page.evaluate(_CUT_CELLS)
        scrolls += page.evaluate(_TABLES_THAT_SCROLL)
        faults += [f"{path.name}: {sideways} px sideways"] if sideways > 0 else []
        faults += [f"{path.name}: cut: {cell}" for cell in cut]
    context.close()
    assert faults == []
    assert len(scrolls) > 100
    assert sum(scrolls) <= (0 if size == DESKTOP else len(scrolls) // 6)
    assert messages == []
    assert {url for url in requests if not url.startswith(site.as_uri())} == set()


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve the site on loopback."""
    handler = partial(_Quiet, directory=str(site))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/index.html"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize("place", ["disk", "server"])
def test_search_finds_commands_and_keys_by_name(site_browser: Any, site: Path, place: str) -> None:
    keys = KEYS[:: len(KEYS) // 12]
    wanted = dict.fromkeys(COMMANDS, "commands.html") | dict.fromkeys(keys, "configuration.html")
    with served(site) as address:
        page = site_browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto((site / "index.html").as_uri() if place == "disk" else address)
        found = {name: pages_found(page, name) for name in wanted}
        page.close()
    assert {name: found[name] for name in wanted if wanted[name] not in found[name][:3]} == {}


def pages_found(page: Any, query: str) -> list[str]:
    """Names of the pages that the search finds, best first."""
    field = page.locator("input[name=query]")
    for text, is_answered in (("", "!item"), (query, "item")):
        field.fill(text)
        field.press("End")  # the theme looks at the text when a key is released
        page.wait_for_function(
            f"(item => {is_answered})(document.querySelector('.md-search-result__item'))"
        )
    links = page.eval_on_selector_all(
        ".md-search-result__link", "links => links.map(link => link.pathname)"
    )
    return list(dict.fromkeys(Path(link).name for link in links))
