"""Audit report as one self-contained HTML page without scripts or external resources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from outrider.audit.certificate import VERDICTS
from outrider.audit.sampling import AS_IS
from outrider.audit.tables import grid_verdict

STYLE = """
:root { color-scheme: light dark; --line: #8886; --good: #1a7f37; --bad: #cf222e; --doubt: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --good: #3fb950; --bad: #ff7b72; --doubt: #d29922; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .7rem .2rem 0; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
.good { color: var(--good); } .bad { color: var(--bad); } .doubt { color: var(--doubt); }
.wide { overflow-x: auto; } small { opacity: .8; }
"""
CLASSES = {"certified": "good", "not certified": "bad", "lossy": "bad", "void": "doubt"}
# Column headings by key of the document.
GREEDY = {
    "prompts": "prompts", "tokens": "tokens", "ties": "ties", "defects": "defects",
    "rounding": "rounding (log-probability)", "threshold": "largest gap of a tie",
}  # fmt: skip
DIFFERENCE = {
    "prompt": "prompt", "place": "equal tokens before", "plain_token": "plain token", "speculative_token": "speculative token",
    "plain_logprobs": "plain scores", "speculative_logprobs": "speculative scores", "gap": "gap", "is_tie": "tie",
}  # fmt: skip
CONTROL = {
    "name": "control", "text": "defect", "caught": "caught", "by": "by", "p_value": "p", "samples": "samples",
    "planned_samples": "samples planned", "planned_part": "part", "planned_power": "power of the plan",
}  # fmt: skip
TEST = {
    "name": "test", "token": "token", "statistic": "statistic", "degrees_of_freedom": "degrees of freedom", "tokens": "tokens",
    "p_value": "p", "holm_p_value": "p (Holm)", "effect": "effect", "smallest_tv": "smallest TV",
}  # fmt: skip
CELL = {
    "method": "method", "k": "K", "batch": "batch", "temperature": "temperature", "prompts": "prompts",
    "differing": "differing", "cost": "cost (seconds with / without)", "faults": "faults",
}  # fmt: skip

READING = """Greedy: every token is compared with plain decoding's. A difference is a <em>tie</em> if plain decoding's score of
its own token leads by at most twice the rounding of a log-probability between the two runs (or one floating-point step,
whichever is larger), otherwise a <em>defect</em>. Sampled: every tested token is compared with the target's exact distribution
given its prefix, computed by plain decoding. <em>G</em> compares counts token by token after equal prefixes, with rare tokens
in one cell; <em>calibration</em> compares how often tokens of a given target probability occurred, over all prefixes; the
<em>likelihood ratio</em> tests for a bias from the target's distribution towards the draft's. All p-values of a method are
corrected together (Holm), so that a correct system is rejected with probability at most alpha. <em>Smallest TV</em> is the
smallest total variation distance from the target's distribution, as seen through the cells of that test, that it would have
detected at the stated power. In the second part half of the drafts are replaced by uniformly sampled tokens and declared as
such: a correct verifier is unaffected, and one that accepts too much is detected quickly. The controls are deliberately wrong
verifiers."""


def page(document: Mapping[str, Any]) -> str:
    """Return the HTML of an audit document of either kind."""
    title = f"Outrider audit: {document['target']}"
    sections = _grid(document) if document["kind"] == "same-text" else _certificates(document)
    body = "\n".join([f"<h1>{escape(title)}</h1>", *sections, *_provenance(document)])
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    head += f"<style>{STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def table(caption: str, headings: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a captioned table of the rows' values under each key of ``headings``; numbers with four digits."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in headings.values())
    lines = ["<tr>" + "".join(f"<td>{_shown(row[key])}</td>" for key in headings) + "</tr>" for row in rows]
    return (
        f'<div class="wide"><table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value))
    return f"{value:,}" if isinstance(value, int) else escape(str(value))


def _certificates(document: Mapping[str, Any]) -> Iterator[str]:
    settings = ", ".join(f"{name} {value}" for name, value in document["settings"].items())
    yield f"<p>Is the running system statistically distinguishable from plain decoding? Sampler: {escape(settings)}.</p>"
    rows = [
        {"method": each["method"], "verdict": each["verdict"], "meaning": VERDICTS[each["verdict"]]}
        for each in document["methods"]
    ]
    rows += [{"method": name, "verdict": "not audited", "meaning": reason} for name, reason in document["not_possible"].items()]
    yield table("Verdicts", {"method": "method", "verdict": "verdict", "meaning": "meaning"}, rows)
    for each in document["methods"]:
        yield from _method(each)
    yield f"<h2>How to read it</h2><p>{READING}</p>"


def _method(found: Mapping[str, Any]) -> Iterator[str]:
    verdict = found["verdict"]
    yield f'<h2>{escape(found["method"])}, K = {found["k"]}: <span class="{CLASSES[verdict]}">{verdict}</span></h2>'
    for line in [*found["findings"], *found["doubts"], *found["remarks"]]:
        yield f"<p>{escape(line)}</p>"
    yield table("Greedy output compared with plain decoding's", GREEDY, [found["greedy"]])
    if found["greedy"]["differences"]:
        yield table("First differences", DIFFERENCE, found["greedy"]["differences"])
    if found["sampling"] is not None:
        yield from _sampling(found["sampling"])


def _sampling(found: Mapping[str, Any]) -> Iterator[str]:
    yield table("Controls: wrong verifiers, which must be caught", CONTROL, found["controls"])
    leak = found["smallest_leak_as_it_is"]
    yield (
        f"<p>Total variation distance of draft and target at the start of a round: {found['draft_distance']:.3g}; with half of"
        f" the drafts replaced {found['draft_distance_stressed']:.3g}. With unchanged drafts, the smallest share of"
        f" rejected drafts whose acceptance would have been detected at {found['power']:.0%} power is"
        f" {'more than all' if leak is None else format(leak, '.2g')}.</p>"
    )
    for name, part in found["parts"].items():
        what = "Unchanged drafts" if name == AS_IS else "Half of the drafts replaced"
        yield table(f"{what}: {part['samples']:,} samples of {found['tokens_per_sample']} tokens", TEST, part["tests"])
        origins = ", ".join(f"{count:,} {origin}" for origin, count in part["origins"].items())
        yield f"<p><small>Tokens by origin: {origins}.</small></p>"


def _grid(document: Mapping[str, Any]) -> Iterator[str]:
    mark = "good" if document["certified"] else "bad"
    yield f'<p>The same text as plain decoding? <strong class="{mark}">{escape(grid_verdict(document))}</strong>.</p>'
    yield table(f"Texts of {document['grid']['max_tokens']} tokens", CELL, document["cells"])
    if document["not_possible"]:
        rows = [{"method": name, "reason": reason} for name, reason in document["not_possible"].items()]
        yield table("Methods that could not be audited", {"method": "method", "reason": "reason"}, rows)


def _provenance(document: Mapping[str, Any]) -> Iterator[str]:
    keys = ("command", "date", "version", "commit", "device", "dtype", "weights", "threads", "seconds")
    rows = [{"what": key, "value": str(document[key])} for key in keys if document.get(key) is not None]
    yield table("Provenance", {"what": "what", "value": "value"}, rows)
