"""The live page in a real browser: from the printed address to a chart that grows."""

import threading
from pathlib import Path
from typing import Any

import pytest

from offbeat.plugins.watch.runs import WatchedRuns
from offbeat.plugins.watch.server import WatchServer


@pytest.fixture
def looks() -> threading.Semaphore:
    """The server looks at the run's files once for each release."""
    return threading.Semaphore(0)


@pytest.fixture
def server(pages: dict[str, Path], looks: threading.Semaphore) -> Any:
    runs = WatchedRuns.at(pages["running"].parent.parent)
    server = WatchServer("127.0.0.1", 0, runs, pause=lambda _: looks.acquire())
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    looks.release(1000)
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_live_page_draws_again_when_the_run_has_written(
    browser: Any, pages: dict[str, Path], server: WatchServer, looks: threading.Semaphore
) -> None:
    context = browser.new_context(viewport={"width": 1320, "height": 900})
    page = context.new_page()
    requests, messages = list[str](), list[str]()
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto(server.url)
    assert "token" not in page.url
    page.get_by_role("link", name="running", exact=True).click()
    page.wait_for_selector("body[data-ready='1']")
    page.wait_for_selector("#made[data-live='1']", state="attached")
    assert page.locator("#learning-charts .uplot").count() > 3
    page.select_option("#group-only", "mixed")
    with (pages["running"].parent / "metrics.jsonl").open("ab") as file:
        file.write(b"\n")
    looks.release()
    page.wait_for_selector("body[data-draws='2']")
    assert page.input_value("#group-only") == "mixed", "what the reader chose stays"
    port = server.server_address[1]
    assert {url.split("/")[2] for url in requests} == {f"127.0.0.1:{port}"}
    assert messages == []
    context.close()


def test_two_ticked_runs_are_opened_side_by_side(
    browser: Any, pages: dict[str, Path], server: WatchServer
) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark")
    page = context.new_page()
    messages, requests = list[str](), list[str]()
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto(server.url)
    page.wait_for_selector("body[data-ready='1']")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
    assert page.locator("#list svg polyline").count() >= 4
    assert page.locator("#list img").count() == 0, "the hostile run's error is text"
    assert page.locator("#compare").is_disabled()
    for name in ("losses", "finished", "seed-1"):
        page.get_by_label(f"Compare {name}", exact=True).check()
    assert page.inner_text("#ticked") == "finished and seed-1", "the last two ticks count"
    page.evaluate("listRuns()")
    assert page.get_by_label("Compare seed-1").is_checked(), "a tick outlives a new list"
    page.locator("#compare").click()
    page.wait_for_selector("body[data-ready='1'] #keys table")
    assert page.locator("#keys tbody th").all_inner_texts() == ["seed"]
    legend = page.locator("#glance .legend").first.inner_text()
    assert "finished" in legend
    assert "seed-1" in legend
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
    port = server.server_address[1]
    assert {url.split("/")[2] for url in requests} == {f"127.0.0.1:{port}"}
    assert messages == []
    context.close()


def test_a_live_page_says_since_when_its_server_has_not_answered(
    browser: Any, pages: dict[str, Path], server: WatchServer, looks: threading.Semaphore
) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.url)
    page.wait_for_selector("body[data-ready='1']")
    assert page.locator("#connection").is_hidden()
    context.set_offline(True)
    page.evaluate("listRuns()")
    page.get_by_text("Disconnected since").wait_for()
    context.set_offline(False)
    page.evaluate("listRuns()")
    page.wait_for_selector("#connection", state="hidden")
    page.get_by_role("link", name="running", exact=True).click()
    page.wait_for_selector("#made[data-live='1']", state="attached")
    page.route("**/data", lambda route: route.abort())
    with (pages["running"].parent / "metrics.jsonl").open("ab") as file:
        file.write(b"\n")
    looks.release()
    page.get_by_text("Disconnected since").wait_for()
    page.unroute("**/data")
    page.wait_for_selector("#connection", state="hidden")
    context.close()
