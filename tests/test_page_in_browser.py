"""The page in a real browser, at desktop and phone width, light and dark: nothing runs, nothing is asked for, nothing
overflows, and the filters work without a script."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agon_cli import report
from documents import HOSTILE, document

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
SCREENS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
OVERFLOWING = """() => [...document.querySelectorAll('body *')].filter(e =>
    e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.scroll, .text, svg')
).map(e => e.outerHTML.slice(0, 80))"""
CONTRAST = """() => {
    const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const light = rgb => 0.2126 * channel(rgb[0]) + 0.7152 * channel(rgb[1]) + 0.0722 * channel(rgb[2]);
    const numbers = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
    const paper = light(numbers(getComputedStyle(document.body).backgroundColor));
    const found = {};
    for (const e of document.querySelectorAll('h1, p, .how, .label, .ends, th, td, a, summary, svg text')) {
        const style = getComputedStyle(e), one = light(numbers(e.closest('svg') ? style.fill : style.color));
        if (e.closest('.matrix td')) continue;
        found[(Math.max(one, paper) + 0.05) / (Math.min(one, paper) + 0.05)] = e.outerHTML.slice(0, 120);
    }
    const least = Math.min(...Object.keys(found).map(Number));
    return [least, found[least]];
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write_page(tmp_path_factory.mktemp("page") / "page.html", document())


@pytest.fixture
def opened(browser: Any, written: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page on a screen of (width, scheme), with what it said and asked for in `said` and `asked`."""
    width, scheme = getattr(request, "param", (1280, "light"))
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.said, page.asked = [], []
    page.on("console", lambda message: page.said.append(message.text))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(written.as_uri())
    yield page
    context.close()


@pytest.mark.parametrize("opened", SCREENS, indirect=True, ids=lambda screen: f"{screen[0]}-{screen[1]}")
def test_nothing_runs_asks_or_overflows(opened: Any, written: Path) -> None:
    opened.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert opened.evaluate(OVERFLOWING) == []
    opened.wait_for_load_state("networkidle")
    assert opened.said == []
    assert opened.asked == [written.as_uri()]
    assert opened.evaluate("window.ran") is None
    assert opened.title() == document()["title"]


@pytest.mark.parametrize("opened", [(390, "light")], indirect=True)
def test_a_phone_shows_every_habit_and_every_cost_without_scrolling(opened: Any) -> None:
    for cells in ("#exchange tbody td", "#costs tbody td", "#arms .stack tbody td"):
        ends = opened.locator(cells).evaluate_all("all => all.map(one => one.getBoundingClientRect().right)")
        assert len(ends) > 20
        assert max(ends) <= 390


def test_labels_of_the_pictures_do_not_overlap_as_they_are_drawn(opened: Any) -> None:
    """In the fonts of a browser, whose widths the page can only estimate."""
    for panel in opened.locator("#lengths svg").all():
        boxes = panel.locator("text").evaluate_all(
            "all => all.map(one => one.getBoundingClientRect()).map(b => [b.left, b.top + 3, b.right, b.bottom - 3])"
        )
        assert len(boxes) > 11
        for n, a in enumerate(boxes):
            assert not [
                b for b in boxes[n + 1 :] if min(a[2], b[2]) > max(a[0], b[0]) and min(a[3], b[3]) > max(a[1], b[1])
            ]


def test_what_is_read_from_an_answer_is_as_large_as_the_words_around_it(opened: Any) -> None:
    size = "one => getComputedStyle(one).fontSize"
    code = opened.locator(".stage h4 code").first
    assert code.evaluate(size) == opened.locator(".stage h4").first.evaluate(size)


def test_values_of_the_provenance_stand_in_one_column(opened: Any) -> None:
    lefts = opened.locator("#provenance dl dl dd").evaluate_all(
        "all => all.map(one => one.getBoundingClientRect().left)"
    )
    assert len(lefts) > 5
    assert len(set(lefts)) == 1


def test_what_a_model_wrote_is_shown_to_the_letter(opened: Any) -> None:
    shown = opened.locator(".sample pre.text").all_text_contents()
    hostile = next(text for text in shown if "<script>" in text)
    assert hostile.startswith("<script>window.ran = true; document.title = 'owned'</script>")
    assert hostile.endswith("unbroken")
    assert len(hostile) > len(HOSTILE)
    assert opened.locator("script, img, iframe, base").count() == 0


@pytest.mark.parametrize("opened", SCREENS, indirect=True, ids=lambda screen: f"{screen[0]}-{screen[1]}")
def test_text_can_be_read_on_its_ground(opened: Any) -> None:
    least, where = opened.evaluate(CONTRAST)
    assert least >= 4.5, where


def test_radios_filter_the_samples(opened: Any) -> None:
    found = document()["samples"]

    def shown() -> list[str]:
        return [one.split("\n")[0] for one in opened.locator(".sample:visible .q").all_inner_texts()]

    def wanted(method: str, outcome: str) -> list[str]:
        return [one["question"].split("\n")[0] for one in found if one["outcome"][method] == outcome]

    assert len(shown()) == len(found)
    assert not opened.locator(".nothing").is_visible()
    for method in ("agon", "grpo", "coop"):
        opened.get_by_role("radio", name=method, exact=True).check(force=True)
        for outcome in ("fix", "break", "right", "wrong"):
            opened.get_by_role("radio", name=outcome, exact=True).check(force=True)
            assert len(shown()) == len(wanted(method, outcome))
            assert [a[:20] for a in shown()] == [b[:20] for b in wanted(method, outcome)]
            assert opened.locator(".nothing").is_visible() == (wanted(method, outcome) == [])
    opened.get_by_role("radio", name="all", exact=True).check(force=True)
    assert len(shown()) == len(found)


def test_the_page_reads_without_scripts_and_prints(browser: Any, written: Path, tmp_path: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(written.as_uri())
    assert page.locator("h2").count() == 10
    assert page.locator("svg[role=img]").count() == 7
    page.get_by_role("radio", name="fix", exact=True).check(force=True)
    assert page.locator(".sample:visible").count() == 2
    printed = page.pdf(format="A4", path=str(tmp_path / "page.pdf"))
    assert printed.startswith(b"%PDF")
    assert 4 <= printed.count(b"/Type /Page\n") <= 12
    context.close()


def test_the_narrow_figure_takes_the_place_of_the_wide_one(browser: Any, written: Path) -> None:
    for width, shown in ((1280, "wide"), (390, "narrow")):
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.goto(written.as_uri())
        assert [name for name in ("wide", "narrow") if page.locator(f".{name} svg").is_visible()] == [shown]
        page.close()
