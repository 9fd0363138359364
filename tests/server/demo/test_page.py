"""The page in headless Chromium, with the real engine and a tiny family."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api")

from playwright.sync_api import sync_playwright

from outrider.server.demo.app import Demo
from outrider.server.demo.track import Track

from .conftest import Server, serving

pytestmark = pytest.mark.browser
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 120_000  # milliseconds; other processes may use the machine


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as started:
        own = started.chromium.executable_path
        found = own if Path(own).exists() else next(filter(None, map(shutil.which, BROWSERS)), None)
        if found is None:
            pytest.skip("no Chromium: run `playwright install chromium`, or install one with the system's packages")
        browser = started.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(track: Track) -> Iterator[Server]:
    demo = Demo(track, {"target": "tiny", "draft": "twin", "plain_tok_s": 100.0})
    with serving(demo) as server:
        yield server
    demo.close()


class Visitor:
    """A page and its errors."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(reduced_motion="reduce", **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.complaints: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda asked: None if asked.url.startswith(url) else self.complaints.append(asked.url))
        self.page.goto(url)
        self.page.locator("#method option").first.wait_for(state="attached")

    def race(self, accuracy: int = 100, temperature: float = 0.0, length: int = 32) -> None:
        page = self.page
        page.select_option("#length", str(length))
        page.locator("#accuracy").fill(str(accuracy))
        page.locator("#temperature").fill(str(temperature))
        page.click("#start")
        self.see("#verdict small", ".")

    def see(self, where: str, text: str) -> None:
        """Wait until an element contains the text."""
        self.page.locator(where, has_text=text).wait_for()

    def figure(self, name: str) -> float:
        return float(self.page.inner_text(f"[data-figure={name}]").rstrip("%\u00d7"))

    def said(self, lane: str) -> str:
        return str(self.page.evaluate(f"[...document.querySelectorAll('#lane-{lane} .said')].map(s => s.textContent).join('')"))


@pytest.fixture
def visitor(browser: Any, server: Server) -> Iterator[Visitor]:
    visitor = Visitor(browser, server.url, viewport={"width": 1280, "height": 900})
    yield visitor
    visitor.context.close()
    assert not visitor.complaints


def test_the_slider_changes_acceptance_but_not_the_text(visitor: Visitor) -> None:
    rates, texts = [], set()
    for accuracy in (100, 50, 0):
        visitor.race(accuracy)
        rates.append(visitor.figure("alpha"))
        assert visitor.said("plain") == visitor.said("speculative") != ""
        assert "The same text, token for token" in visitor.page.inner_text("#verdict")
        texts.add(visitor.said("speculative"))
    assert rates[0] == 100 and 10 < rates[1] < 90 and rates[2] < 5
    assert len(texts) == 1
    assert visitor.page.locator("#lane-speculative del").count() > 10
    assert visitor.page.locator("#lane-speculative .tok.corrected").count() > 10


@pytest.mark.parametrize(
    ("offer", "temperature", "note"),
    [
        ({}, 0.0, "Greedy: both texts must be equal."),
        ({}, 0.8, "Two samples from one distribution: the texts differ."),
        ({"same_text": True}, 0.8, "Samples with common random numbers: both texts must be equal."),
        ({"lossless": False}, 0.0, "The verifier is lossy: the texts follow different distributions."),
    ],
)
def test_the_note_on_the_temperature_says_whether_the_texts_differ(
    visitor: Visitor, offer: dict[str, bool], temperature: float, note: str
) -> None:
    visitor.page.route("**/api/about", lambda route: route.fulfill(json=route.fetch().json() | offer))
    visitor.page.reload()
    visitor.page.locator("#method option").first.wait_for(state="attached")
    visitor.page.locator("#temperature").fill(str(temperature))
    visitor.see("#temperature-note", note)


def test_charts_of_the_last_race_are_not_shown_for_the_next(visitor: Visitor) -> None:
    visitor.race()
    assert visitor.figure("alpha") == 100
    assert str(visitor.page.text_content("#equation")).startswith("K+1Kc+1=")  # the general formula would be 0 / 0
    events = [{"type": "started"}, {"type": "error", "message": "no drafts."}]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    visitor.page.route("**/api/race", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    visitor.page.click("#start")
    visitor.see("#status", "no drafts.")
    shown = "[...document.querySelectorAll('.chart, #equation')].map(part => part.innerHTML)"
    assert visitor.page.evaluate(shown) == ["", "", ""]


def test_a_clicked_token_shows_its_distributions(visitor: Visitor) -> None:
    page = visitor.page
    page.locator("#k").fill("2")
    visitor.race(accuracy=50, temperature=1.0)
    widths = "[...document.querySelectorAll('.tok .said')].map(s => [s.textContent, s.getBoundingClientRect().width])"
    # An incomplete character, a newline, an accent: each can be clicked.
    assert not [text for text, width in page.evaluate(widths) if width <= 1]
    page.locator("#lane-speculative .tok.corrected .said").first.click()
    heads = page.locator(".odds thead th").all_inner_texts()
    assert [head.split()[0] for head in heads] == ["Token", "Draft", "Target", "Residual:"]
    assert page.locator(".odds tr.emitted").count() == 1
    assert "it was rejected" in page.inner_text(".story")
    page.locator("#lane-plain .tok .said").last.click()
    assert page.locator(".tok[aria-selected=true]").count() == 1
    assert "No draft at this position" in page.inner_text(".story")


@pytest.mark.parametrize(
    ("is_same_text", "rule"), [("false", "only with --verifier rejection"), ("true", "With --same-text a draft is accepted")]
)
def test_probabilities_of_other_verifiers_are_not_shown(visitor: Visitor, is_same_text: str, rule: str) -> None:
    said = visitor.page.evaluate(
        """async () => {
            const { Inspector } = await import(new URL("inspector.js", document.querySelector("script[src]").src));
            const place = {
                tokens: ["a", "b"], row: 0, guesses: [{ row: 1, chance: null, accepted: false }],
                target: [0.5, 0.5], draft: [0.2, 0.8], residual: null, odds: null, is_point_mass: false,
            };
            const root = document.getElementById("inspector");
            new Inspector(root).show({ name: "a", origin: "corrected", place }, 1, IS_SAME_TEXT);
            return root.querySelector(".detail").textContent;
        }""".replace("IS_SAME_TEXT", is_same_text)
    )
    assert "The draft proposed b; the emitted token is a." in said and rule in said
    assert "acceptance probability" not in said and "Residual:" not in said and "The residual is empty" not in said


def test_the_page_can_be_used_by_keyboard_alone(visitor: Visitor) -> None:
    page = visitor.page

    def focused() -> str:
        return str(page.evaluate("document.activeElement.id || document.activeElement.textContent"))

    order = []
    for _ in range(14):
        page.keyboard.press("Tab")
        order.append(focused())
        if order[-1] == "start":
            break
    wanted = ["prompt", "method", "length", "k", "auto", "temperature", "accuracy", "start"]
    assert [each for each in order if each in wanted] == wanted
    page.locator("#accuracy").focus()
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#accuracy-value") == "95%"
    page.locator("#length").select_option("32")
    page.locator("#prompt").focus()
    page.keyboard.press("Control+Enter")
    visitor.see("#verdict small", ".")
    page.locator("#lane-speculative .text").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    tokens = "[...document.querySelectorAll('#lane-speculative .tok')]"
    assert page.evaluate(f"{tokens}.indexOf(document.activeElement)") == 2
    page.keyboard.press("End")
    assert page.evaluate(f"{tokens}.at(-1) === document.activeElement")
    assert page.locator(".detail").is_visible()
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.closest('#lane-plain') !== null")
    page.keyboard.press("Shift+Tab")  # and leave the lanes
    assert page.evaluate("document.activeElement.closest('.text')") is None
    page.locator("#guesses").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate(f"{tokens}.at(-1) === document.activeElement")  # at the token left before
    assert page.locator(".tok[aria-selected=true]").count() == 1


def test_a_race_ends_with_its_last_event_before_the_replay_ends(visitor: Visitor) -> None:
    """The verdict appears at the end; on a slow machine all rounds are on the page some time before."""
    ends = visitor.page.evaluate(
        """async () => {
            const { Player } = await import(new URL("player.js", document.querySelector("script[src]").src));
            const frames = async (n) => { while (n--) await new Promise(requestAnimationFrame); };
            const ends = [], player = new Player(() => {}, () => {}, () => ends.push(player.isFinished));
            player.rate = Infinity;
            for (const lane of ["plain", "speculative"]) player.add({ lane, clock: 1, finish_reason: "length" });
            await frames(4);
            player.finish();
            await frames(4);
            player.replay();
            await frames(4);
            return ends;
        }"""
    )
    assert ends == [True, True]


def test_a_refused_race_keeps_the_previous_replay(visitor: Visitor) -> None:
    visitor.race()
    first, said = visitor.page.input_value("#prompt"), visitor.said("speculative")
    visitor.page.fill("#prompt", "x y z " * 600)
    visitor.page.click("#start")
    visitor.see("#status.error", "with max_tokens=")
    visitor.page.click("#replay")
    visitor.see("#verdict small", "The same text")
    assert visitor.page.inner_text("#lane-plain .prompt-text").strip() == first.strip()
    assert visitor.said("speculative") == said
    visitor.complaints.clear()  # of the refused race


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_both_colour_schemes_and_on_narrow_screens(browser: Any, server: Server, scheme: str) -> None:
    """Every text colour on its background has a contrast of at least 4.5 to 1 (WCAG 2.2, AA)."""
    visitor = Visitor(browser, server.url, color_scheme=scheme, viewport={"width": 390, "height": 844})
    visitor.race(accuracy=50)
    visitor.page.locator("#lane-speculative .tok.corrected .said").first.click()
    assert visitor.page.evaluate("document.documentElement.scrollWidth") <= 390
    poor = visitor.page.evaluate((Path(__file__).parent / "contrasts.js").read_text())
    assert not poor and not visitor.complaints
    visitor.context.close()


def test_errors_and_a_lost_server_are_shown_on_the_page(visitor: Visitor) -> None:
    page = visitor.page
    page.fill("#prompt", "x y z " * 600)
    page.click("#start")
    visitor.see("#status.error", "with max_tokens=128")
    page.route("**/api/race", lambda route: route.abort())
    page.click("#start")
    visitor.see("#status.error", "does not answer")
    assert page.is_enabled("#start")
    assert len(visitor.complaints) == 2 and all("Failed to load" in each for each in visitor.complaints)
    visitor.complaints.clear()
