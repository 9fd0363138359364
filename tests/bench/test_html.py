"""The HTML report is self-contained, each plot has a table, and document text is escaped."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from bench_documents import grid

from outrider import OutriderError
from outrider.bench import html
from outrider.bench.breakdown import MEANING
from outrider.bench.plots import plots
from outrider.cli.bench_documents import check_outputs

FIGURES = {
    "Speedup over plain decoding by draft length",
    "Tokens per target pass",
    "Acceptance of drafts by position",
    "Speedup over plain decoding by batch size",
    "Speedup over plain decoding by workload",
    "Time per token by phase",
}


class Page(HTMLParser):
    """Parsed page: tags with attributes, and the content of each figure."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []  # tag, name, value
        self.figures: list[dict[str, int]] = []
        self.titles: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.open.append(tag)
        if tag == "figure":
            self.figures.append({})
        elif "figure" in self.open:
            self.figures[-1][tag] = self.figures[-1].get(tag, 0) + 1
        if tag == "svg":
            self.titles.append(dict(attrs)["aria-label"] or "")

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def test_loads_are_not_pooled() -> None:
    quiet, busy = grid(), grid()
    busy["cells"] = [each | {"busy": 2, "decode_speedup": 99.0, "speedup": 99.0} for each in busy["cells"]]
    both, alone = plots([*quiet["cells"], *busy["cells"]]), plots(quiet["cells"])
    assert [plot.rows for plot in both] == [plot.rows for plot in alone]
    assert "batch 1, 2 other busy processes" in html.page(busy)


@pytest.fixture(scope="module")
def page() -> str:
    return html.page(grid(batches=(1, 4)))


def test_the_report_needs_no_network(page: str) -> None:
    assert "http" not in page and "//" not in re.sub(r"/\*.*?\*/", "", page) and "@import" not in page
    for tag, name, value in Page(page).attributes:
        assert tag not in ("link", "script", "img", "iframe", "object")
        assert name not in ("src", "srcset", "data")
        if name in ("href", "xlink:href") or "url(" in value:
            assert "#" in value


def test_every_plot_has_a_title_units_and_a_table(page: str) -> None:
    found = Page(page)
    assert set(found.titles) == FIGURES and len(found.figures) == len(FIGURES)
    for figure in found.figures:
        assert figure["svg"] == figure["table"] == 1
        assert figure["td"] > 3 and figure["caption"] == 1
    for label in (
        "passes (%)",
        "accepted (%)",
        "speedup after the first token (x)",
        "milliseconds per token",
        "batch size",
    ):
        assert label in found.text


def test_colours_follow_the_colour_scheme(page: str) -> None:
    assert "prefers-color-scheme: dark" in page and "var(--ink)" in page
    drawn = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert not re.search(r"#000000|#ffffff|black|white", drawn)


def test_element_ids_are_unique(page: str) -> None:
    meanings: dict[str, set[str]] = {}
    for name, rest in re.findall(r'\bid="([^"]+)"([^>]*)>', page):
        meanings.setdefault(name, set()).add(rest)
    assert meanings and all(len(found) == 1 for found in meanings.values())


def test_text_of_the_document_is_escaped(page: str) -> None:
    assert "toy &lt;model&gt;" in page and "<model>" not in page


def test_each_temperature_has_its_plots() -> None:
    found = Page(html.page(grid(temperatures=(0.0, 0.8))))
    assert "Greedy, batch 1" in found.text and "Temperature 0.8, batch 1" in found.text
    assert len(found.figures) == 2 * (len(FIGURES) - 1)  # one batch size: no plot over batch sizes


def test_more_methods_than_colours_and_dollar_signs_are_drawn() -> None:
    result = grid(batches=(1, 4))
    plain = [each for each in result["cells"] if each["k"] == 0]
    cells = [each for each in result["cells"] if each["method"] == "draft" and each["k"] == 4]
    names = [f"draft:draft=./${{{number}}}_$x" for number in range(10)]
    text = Page(html.page(result | {"cells": plain + [each | {"method": name} for name in names for each in cells]})).text
    legend_of_the_first_plot = text[: text.index("Points: measured")]
    assert all(f"{name}, formula" in legend_of_the_first_plot for name in names)
    assert "2 more draft lengths are in the table of speed and acceptance below" in text


def test_warnings_are_on_the_page() -> None:
    result = grid()
    result["cells"][1] |= {"same_text": 0.0, "faults": 3}
    text = Page(html.page(result | {"interrupted": True})).text
    assert "interrupted" in text and "differ from plain decoding" in text and "failed 3 times" in text


def test_plain_decoding_alone_gives_a_report() -> None:
    result = grid()
    result["cells"] = [cell for cell in result["cells"] if cell["method"] == "plain"]
    assert "Time per token by phase" in html.page(result)


def test_a_missing_matplotlib_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.errors.find_spec", lambda name: None)
    advice = r"requires matplotlib: run \S+ -m pip install -e '.\[report\]' in Outrider's folder"
    with pytest.raises(OutriderError, match=advice):
        check_outputs({}, [], report=Path("x.html"))
    monkeypatch.delitem(sys.modules, "outrider.bench.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OutriderError, match=advice):
        html.page(grid())


def test_the_documentation_explains_the_parts_in_the_same_words() -> None:
    text = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
    assert [part for part, meaning in MEANING.items() if f"| `{part}` | {meaning} |" not in text] == []
