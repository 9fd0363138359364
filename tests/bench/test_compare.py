"""`bench compare` on documents with known noise."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench_documents import cell, document, noisy

from outrider.bench.compare import compare, notes

WORKLOADS = ("code", "edit", "json", "math", "chat", "story")


def measured(seed: int, plain: float = 100.0, draft: float = 150.0, noise: float = 0.02, **more: object) -> dict[str, object]:
    """Return plain decoding and one method over six workloads. Speeds drift together within a repeat, as on a real machine."""
    generator, cells = random.Random(seed), []
    for name in WORKLOADS:
        base = noisy(plain, noise, generator)
        cells.append(cell("plain", 0, base, base, name))
        ours = [speed * draft / plain * (1 + generator.gauss(0, noise / 4)) for speed in base]
        cells.append(cell("draft", 4, ours, base, name))
    return document(cells, **more)


def words(before: dict[str, object], after: dict[str, object]) -> dict[str, str]:
    return {each.after["workload"] + " " + each.after["method"]: each.verdict for each in compare(before, after).changes}


def test_unchanged_documents_rarely_give_a_false_alarm() -> None:
    alarms = sum(compare(measured(2 * seed), measured(2 * seed + 1)).has_loss for seed in range(40))
    assert alarms <= 5  # at most 2 expected


def test_a_method_that_became_slower_is_found() -> None:
    found = compare(measured(1), measured(2, draft=120))
    assert found.has_loss and found.verdict == "12 cells compared, 6 changed significantly, 6 for the worse"
    said = words(measured(1), measured(2, draft=120))
    assert said["code plain"] == "no significant change" and said["code draft"] == "slower"


def test_a_slower_machine_is_distinguished_from_a_slower_method() -> None:
    said = words(measured(1), measured(2, plain=75, draft=112.5))
    assert said["code plain"] == "slower" and said["code draft"] == "slower, like plain decoding"
    said = words(measured(1), measured(2, plain=140))
    assert said["code plain"] == "faster" and said["code draft"] == "smaller speedup over plain decoding"
    assert not compare(measured(1), measured(2, plain=140)).has_loss  # nothing is slower


def test_an_improvement_is_not_a_regression() -> None:
    found = compare(measured(1), measured(2, draft=190))
    assert not found.has_loss and {each.verdict for each in found.changes} == {"no significant change", "faster"}


def test_unmatched_cells_and_different_settings_are_listed() -> None:
    before, after = measured(1), measured(1, device="cpu: another", dtype="bfloat16")
    after["cells"] = [*after["cells"][2:], cell("ngram", "auto", [1.0] * 3, [1.0] * 3, "code", temperature=0.8, batch=4)]
    found = compare(before, after)
    assert found.only_before == ["code: plain", "code: draft k=4"]
    assert found.only_after == ["code, t=0.8, batch 4: ngram k=auto"]
    assert found.settings == {"dtype": ("float32", "bfloat16"), "device": ("cpu: test", "cpu: another")}


def test_different_prompts_and_seeds_are_noted() -> None:
    def notes_of(**more: object) -> Sequence[str]:
        known = {"seed": 0, "prompt_digests": {"code": "a", "edit": "b"}}
        return notes(compare(measured(1) | known, measured(1) | more))

    assert notes_of(seed=1, prompt_digests={"code": "c", "edit": "b", "json": "d"}) == [
        "seed differs: 0 > 1",
        "prompts differ: code",
    ]
    assert not notes_of()  # of an earlier version, without both


def test_on_another_machine_only_speedups_are_compared() -> None:
    assert not compare(measured(1), measured(2, plain=50, draft=75, device="cpu: slow")).has_loss
    assert compare(measured(1), measured(2, plain=200, draft=220, device="cpu: fast")).has_loss


def test_on_another_machine_other_plain_speeds_are_no_changes() -> None:
    found = compare(measured(1), measured(2, plain=50, draft=75, device="cpu: slow"))
    assert found.verdict.startswith("12 cells compared, 0 changed significantly, 0 for the worse")
    assert compare(measured(1), measured(2, plain=200, draft=220, device="cpu: fast")).verdict.startswith(
        "12 cells compared, 6 changed significantly, 6 for the worse"
    )
    plain = measured(1, device="cpu: slow")
    plain["cells"] = [each for each in plain["cells"] if each["method"] == "plain"]  # type: ignore[attr-defined]
    assert compare(measured(1), plain).verdict == (
        "nothing to compare: the documents are of different machines and have no common cell with drafts"
    )


def test_one_repeat_is_too_few() -> None:
    one = document([cell("plain", 0, [100.0], [100.0]), cell("draft", 4, [150.0], [100.0])])
    two = document([cell("plain", 0, [10.0], [10.0]), cell("draft", 4, [15.0], [10.0])])
    assert {each.verdict for each in compare(one, two).changes} == {"too few repeats"}
    assert not compare(one, two).has_loss
    assert compare(one, two).verdict == (
        "2 cells compared, but too few repeats to test anything, 0 for the worse: measure with --repeat 5 or more"
    )


def test_a_coarse_comparison_says_what_it_cannot_detect() -> None:
    def twice(speeds: list[float]) -> str:
        return compare(document([cell("plain", 0, speeds, speeds)]), document([cell("plain", 0, speeds, speeds)])).verdict

    assert twice([99.0, 100.0, 101.0, 100.0, 100.0]) == "1 cell compared, 0 changed significantly, 0 for the worse"
    assert twice([90.0, 110.0]).endswith(
        "0 for the worse; too few repeats to detect a slowdown below 46%: measure with a larger --repeat"
    )


def test_fewer_equal_outputs_are_a_regression_at_any_speed() -> None:
    before, after = measured(1), measured(1)
    after["cells"][1]["same_text"] = 0.5
    found = compare(before, after)
    assert found.has_loss and "FEWER OUTPUTS" in found.changes[1].verdict
