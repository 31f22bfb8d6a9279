"""The page of a run in a real browser: what a person sees, and what may not happen."""

from pathlib import Path
from typing import Any, Self

import pytest

KINDS = ("finished", "losses", "running", "failed", "empty", "no-numbers", "hostile", "compared")
DESKTOP, PHONE = (1320, 900), (390, 844)
SHOTS = (
    ("losses", "light", DESKTOP, "report", 1140),
    ("losses", "dark", DESKTOP, "report-groups", "#samples"),
    ("losses", "light", PHONE, "report-phone", 900),
)
_LUMINANCE = """
names => {
  const style = getComputedStyle(document.documentElement);
  const channel = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  return Object.fromEntries(names.map(name => {
    const hex = style.getPropertyValue(name).trim();
    const [r, g, b] = [1, 3, 5].map(i => channel(parseInt(hex.slice(i, i + 2), 16) / 255));
    return [name, 0.2126 * r + 0.7152 * g + 0.0722 * b];
  }));
}
"""


class OpenedPage:
    """A page that was opened, with every request and console message of it."""

    def __init__(
        self,
        browser: Any,
        path: Path,
        size: tuple[int, int] = DESKTOP,
        scheme: str = "light",
    ) -> None:
        width, height = size
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.requests = list[str]()
        self.messages = list[str]()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-ready='1']")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def sideways_px(self) -> int:
        return self.page.evaluate("document.documentElement.scrollWidth - innerWidth")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_loads_nothing_says_nothing_and_fits(
    browser: Any, pages: dict[str, Path], kind: str, size: tuple[int, int]
) -> None:
    with OpenedPage(browser, pages[kind], size, "dark" if size == PHONE else "light") as opened:
        assert opened.requests == [pages[kind].as_uri()]
        assert opened.messages == []
        assert opened.sideways_px() == 0
        assert opened.page.inner_text("#headline") or kind == "empty"


def test_a_run_cannot_bring_markup_into_the_page(browser: Any, pages: dict[str, Path]) -> None:
    with OpenedPage(browser, pages["hostile"]) as opened:
        page = opened.page
        title = page.title()
        for index in range(0, 40, 7):
            page.fill("#group-number", str(index))
            page.locator("#groups tbody button").first.click()
        page.locator("#metrics summary").last.click()
        assert page.title() == title
        assert (
            page.evaluate("document.images.length + document.querySelectorAll('svg').length") == 0
        )
        assert page.evaluate("document.scripts.length") == 2
        assert "<img src=x" in page.inner_text("#story"), "shown as the text that it is"
        assert opened.messages == []


def test_markup_that_slipped_through_could_neither_run_nor_load(
    browser: Any, pages: dict[str, Path]
) -> None:
    with OpenedPage(browser, pages["finished"]) as opened:
        refused = opened.page.evaluate("""() => new Promise(done => {
          const seen = [];
          document.addEventListener('securitypolicyviolation', event => {
            seen.push(event.effectiveDirective);
            if (seen.length === 3) done(seen.sort());
          });
          const box = document.createElement('div');
          box.innerHTML = '<img src="https://example.org/x.png" onerror="document.title=1">';
          document.body.append(box);
          const script = document.createElement('script');
          script.textContent = 'document.title = "taken"';
          document.body.append(script);
        })""")
        assert refused == ["img-src", "script-src-attr", "script-src-elem"]
        assert "taken" not in opened.page.title()


def test_groups_are_filtered_sorted_and_told(browser: Any, pages: dict[str, Path]) -> None:
    with OpenedPage(browser, pages["losses"]) as opened:
        page = opened.page
        page.select_option("#group-only", "retried")
        retried = int(page.inner_text("#group-count").split()[0].replace(",", ""))
        assert 0 < retried < 200
        page.select_option("#group-only", "text")
        page.locator("#groups th button", has_text="reward").click()
        rewards = page.locator("#groups tbody tr td:nth-child(3)").all_inner_texts()
        assert rewards == sorted(rewards, key=float)
        page.locator("#groups tbody button").first.click()
        examples = page.inner_text("#story")
        for part in ("Prompt", "8 samples", "What became of it", "dispatched", "committed"):
            assert part in examples
        page.select_option("#group-only", "dropped")
        assert page.inner_text("#group-count").startswith("1 group")


def test_a_legend_says_where_its_value_is_smoothed(browser: Any, pages: dict[str, Path]) -> None:
    with OpenedPage(browser, pages["losses"]) as opened:
        page = opened.page
        legends = "#glance .legend"
        assert "smoothed" in page.locator(legends).first.inner_text()
        assert "smoothed" not in page.locator("#learning-charts .legend").first.inner_text()
        assert "smoothed" not in page.locator("#sync-charts .legend").first.inner_text()
        page.fill("#smoothing", "0")
        assert not page.locator(legends, has_text="smoothed").count()


def test_evaluations_are_drawn_at_the_versions_that_were_scored(
    browser: Any, pages: dict[str, Path]
) -> None:
    with OpenedPage(browser, pages["losses"]) as opened:
        panel = opened.page.locator("#learning-charts figure", has_text="Evaluation")
        assert panel.count() == 1
        drawn = "charts.find(each => each.box.innerText.startsWith('Evaluation')).plot.data[0]"
        assert opened.page.evaluate(f"Array.from({drawn})") == list(range(0, 161, 20))


def test_a_group_of_two_weight_versions_is_shaded_by_version(
    browser: Any, pages: dict[str, Path]
) -> None:
    with OpenedPage(browser, pages["losses"]) as opened:
        page = opened.page
        page.select_option("#group-only", "mixed")
        examples = set(page.evaluate("Object.keys(view.page.runs[0].examples)"))
        rows = page.locator("#groups tbody button")
        names = [int(name.removeprefix("g-")) for name in rows.all_inner_texts()]
        shown = next(row for row, name in enumerate(names) if str(name) in examples)
        rows.nth(shown).click()
        assert page.locator("#story .responses .v1").count() > 0
        assert page.locator("#story .version").count() == 2


def test_axis_smoothing_and_filter_change_what_is_drawn(
    browser: Any, pages: dict[str, Path]
) -> None:
    with OpenedPage(browser, pages["losses"]) as opened:
        page = opened.page
        last = "document.querySelector('#glance .legend b').textContent"
        before = page.evaluate(last)
        page.fill("#smoothing", "0")
        assert page.evaluate(last) != before
        page.select_option("#axis", "time")
        ends = page.evaluate("Array.from(charts[0].plot.data[0]).at(-1) / view.page.runs[0].end_s")
        assert 0.9 < ends <= 1.0
        page.fill("#metric-filter", "^sync/(pause|bytes)")
        assert page.inner_text("#metrics .bar .dim").startswith("2 of ")
        assert page.locator("#metrics .uplot").count() == 2
        page.fill("#metric-filter", "sync/(")
        assert page.inner_text("#metrics .bar .dim").startswith("0 of "), (
            "no regular expression yet"
        )
        assert opened.messages == []


def test_the_incidents_are_a_table_and_say_when_it_was_over(
    browser: Any, pages: dict[str, Path]
) -> None:
    with OpenedPage(browser, pages["losses"]) as opened:
        rows = opened.page.locator("#incidents tbody tr").all_inner_texts()
    what = [row.split("\t")[2] for row in rows]
    assert what == ["engine lost", "trainer lost", "rewound", "quiet", "controller lost"]
    assert all(row.split("\t")[-1].strip() for row in rows if "rewound" not in row)


def test_a_figure_that_does_not_exist_is_a_dash(browser: Any, pages: dict[str, Path]) -> None:
    with OpenedPage(browser, pages["no-numbers"]) as opened:
        text = opened.page.inner_text("main")
        assert "NaN" not in text and "undefined" not in text and "null" not in text


@pytest.mark.parametrize("size", [(1280, 800), PHONE], ids=["desktop", "phone"])
def test_reward_entropy_and_kl_are_above_everything_but_the_outcome(
    browser: Any, pages: dict[str, Path], size: tuple[int, int]
) -> None:
    with OpenedPage(browser, pages["losses"], size) as opened:
        titles = opened.page.locator("#glance figcaption b").all_inner_texts()
        assert titles == ["Reward", "Entropy", "KL divergence"]
        assert opened.page.locator("#glance .uplot").count() == 3
        ends = opened.page.evaluate("$('glance').getBoundingClientRect().bottom")
        assert ends < 800 or size == PHONE
        below = (
            "$('glance').getBoundingClientRect().bottom <= $('uptime').getBoundingClientRect().top"
        )
        assert opened.page.evaluate(below)


def test_the_same_prompt_is_shown_early_and_late_with_both_rewards(
    browser: Any, pages: dict[str, Path]
) -> None:
    with OpenedPage(browser, pages["losses"]) as opened:
        section = opened.page.locator("#same")
        assert "Of 4 evaluation prompts, 2 had a higher mean reward" in section.inner_text()
        first = section.locator("article").first.inner_text()
        for part in ("1+11=", "version 0 · reward 0", "7", "version 160 · reward 1", "12"):
            assert part in first
    with OpenedPage(browser, pages["finished"]) as opened:
        assert opened.page.locator("#same").is_hidden(), "each prompt was sampled once"


def test_a_sample_that_failed_is_shown_with_row_response_and_traceback(
    browser: Any, pages: dict[str, Path]
) -> None:
    with OpenedPage(browser, pages["hostile"]) as opened:
        failed = opened.page.locator("#failures details").first.inner_text()
        assert "g-000003, sample 2" in failed
        assert failed.count("<img src=x") == 4, "as text: message, row, response, traceback"
    with OpenedPage(browser, pages["losses"]) as opened:
        assert opened.page.locator("#failures").is_hidden()


def test_of_compared_runs_the_keys_that_differ_come_first_and_each_chart_has_both(
    browser: Any, pages: dict[str, Path]
) -> None:
    with (
        OpenedPage(browser, pages["compared"]) as opened,
        OpenedPage(browser, pages["finished"]) as alone,
    ):
        page = opened.page
        assert page.inner_text("h1") == "finished and seed-1"
        assert page.locator("#keys tbody th").all_inner_texts() == ["seed"]
        top = "$('keys').getBoundingClientRect().bottom < $('glance').getBoundingClientRect().top"
        assert page.evaluate(top)
        assert not page.locator("#cards").is_visible()
        charts = "#glance figure, #learning-charts figure, #age-charts figure, #sync-charts figure"
        titles = set(page.locator(f":is({charts}) figcaption b").all_inner_texts())
        of_one = set(alone.page.locator(f":is({charts}) figcaption b").all_inner_texts())
        assert titles == of_one - {"Age of the samples"} | {"Step"}
        for legend in page.locator(f":is({charts}) .legend").all_inner_texts():
            assert "finished" in legend
            assert "seed-1" in legend


def test_the_keyboard_reaches_every_control(browser: Any, pages: dict[str, Path]) -> None:
    with OpenedPage(browser, pages["finished"]) as opened:
        page = opened.page
        controls = "a, button:enabled, select, input, summary"
        reached = set[str]()
        for _ in range(page.locator(controls).count() + 5):
            page.keyboard.press("Tab")
            reached.add(
                page.evaluate("document.activeElement.id || document.activeElement.textContent")
            )
        assert {
            "axis",
            "smoothing",
            "whole",
            "group-number",
            "group-only",
            "metric-filter",
        } <= reached
        assert {"next", "g-000000", "reward"} <= reached
        page.locator("#groups tbody button").first.focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "story"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out_from_their_ground(
    browser: Any, pages: dict[str, Path], scheme: str
) -> None:
    """WCAG: 4.5 to 1 for text, 3 to 1 for what a chart draws."""
    texts = ["--fg", "--dim", "--link", "--good", "--bad", "--warn", "--live"]
    lines = ["--c0", "--c1", "--c2", "--c3", "--c4"]
    with OpenedPage(browser, pages["empty"], scheme=scheme) as opened:
        light = opened.page.evaluate(_LUMINANCE, [*texts, *lines, "--bg", "--panel"])

    def contrast(one: str, other: str) -> float:
        bright, dark = sorted((light[one], light[other]), reverse=True)
        return (bright + 0.05) / (dark + 0.05)

    weak = [
        name for name in texts for ground in ("--bg", "--panel") if contrast(name, ground) < 4.5
    ]
    weak += [name for name in lines if contrast(name, "--panel") < 3]
    assert weak == []


def test_the_page_prints_without_its_controls(browser: Any, pages: dict[str, Path]) -> None:
    with OpenedPage(browser, pages["losses"], scheme="dark") as opened:
        opened.page.emulate_media(media="print", color_scheme="light")
        assert not opened.page.locator("#axis").is_visible()
        assert len(opened.page.pdf()) > 20_000


@pytest.mark.parametrize("shot", SHOTS, ids=lambda shot: shot[3])
def test_the_pictures_of_the_documents(
    browser: Any, pages: dict[str, Path], shot: Any, request: pytest.FixtureRequest
) -> None:
    directory: Path | None = request.config.getoption("--screenshots")
    if directory is None:
        pytest.skip("no --screenshots DIR")
    kind, scheme, size, name, height = shot
    directory.mkdir(parents=True, exist_ok=True)
    with OpenedPage(browser, pages[kind], size, scheme) as opened:
        page = opened.page
        top, tall = 0, height
        if isinstance(height, str):
            top, tall = page.evaluate("s => [$(s).offsetTop, $(s).offsetHeight]", height[1:])
        clip = {"x": 0, "y": top, "width": size[0], "height": tall}
        page.screenshot(path=directory / f"{name}.png", full_page=True, clip=clip)
