"""The family's recipe at tiny size: it learns, resumes exactly, keeps its time budget, and reads no benchmark prompts."""

from __future__ import annotations

import doctest
import lzma
import operator
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from cut import run_until

from outrider.train import optim
from outrider.train.claims import check_or_record_identity, fingerprint
from outrider.train.distillation import DistillationLoss
from outrider.train.layer_skip import EarlyExitLoss, drop_rates
from outrider.train.options import Distillation, LayerSkip
from outrider.train.plan import TrainingPlan
from outrider.train.trainer import Trainer
from outrider.types import OutriderError
from recipes import PACKAGE
from recipes.family import chats, corpus, data, evaluate, loops, model, samples, stages, tokenizer, written
from recipes.family.config import PRESETS, AgainstLoops, Growth

TINY = PRESETS["tiny"]
PLAN = replace(TINY.target_plan, eval_every_s=1e9, save_every_s=1e9)
CODE = 'def add(first, second):\n    """Return the sum."""\n    total = first + second\n    return total\n'


def target_run(folder: Path, plan: TrainingPlan = PLAN) -> Trainer:
    """Return a run of a tiny target on tokens with an obvious pattern."""
    net = model.build(TINY.target, TINY, plan.seed)
    stream = np.tile(np.arange(3, 67, dtype=np.uint16), 40)
    batches = data.Mixture({"pattern": stream, "reverse": stream[::-1]}, {"pattern": 2.0, "reverse": 1.0}, plan.seed)
    growth = Growth(exit_share=0.5, grow_at=0.3)
    loss = model.GrowingExitLoss(model.LlamaDecoder(net), LayerSkip(), seed=plan.seed, growth=growth)
    return Trainer("target", net, batches, loss, plan, folder)


def test_training_reduces_the_loss(tmp_path: Path) -> None:
    trainer = target_run(tmp_path)
    trainer.run()
    losses = [point["loss"] for point in trainer.curve]
    assert losses[-1] < 0.5 * losses[0]
    assert any("exit_2" in point for point in trainer.curve)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = target_run(tmp_path / "whole")
    whole.run()
    run_until(17, target_run(tmp_path / "parts"))
    resumed = target_run(tmp_path / "parts")
    assert resumed.step == 17
    resumed.run()
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def test_generated_rows_of_another_target_or_number_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = stages.Workshop("tiny", tmp_path, tmp_path)
    made: list[int] = []
    monkeypatch.setattr(stages, "continue_rows", lambda *_: (made.append(1), torch.ones(3, 9))[1])
    monkeypatch.setattr(stages.tokenizer, "load", lambda _: None)
    monkeypatch.setattr(stages.data, "training_mixture", lambda *_: SimpleNamespace(batch=lambda *_: None))
    monkeypatch.setattr(stages.prompts, "mixed_prompts", lambda *_: torch.ones(3, 4))
    first, second = (model.build(TINY.target, TINY, seed) for seed in (1, 2))
    for _ in range(2):
        assert len(stages.write_text(shop, first, 3)) == 3 and len(made) == 1
    for teacher, rows, what in ((second, 3, "target"), (first, 4, "rows")):
        with pytest.raises(OutriderError, match=f"generated belongs to a run with other {what}"):
            stages.write_text(shop, teacher, rows)


def test_the_draft_learns_from_the_target(tmp_path: Path) -> None:
    teacher = model.build(TINY.target, TINY, 1)
    torch.nn.init.normal_(teacher.model.embed_tokens.weight)  # make the teacher's distribution less uniform
    student = model.build(TINY.draft, TINY, 2)
    stream = np.random.default_rng(0).integers(3, 200, 5000).astype(np.uint16)
    rows = data.DistillationRows(data.Mixture({"noise": stream}, {"noise": 1.0}, 3), torch.full((4, 33), 7), 0.5)
    distilled = DistillationLoss(student, teacher, Distillation())
    loss = model.plain_first(0.1, model.text_loss(student, torch.float32), distilled)
    trainer = Trainer("draft", student, rows, loss, replace(TINY.draft_plan, save_every_s=1e9), tmp_path)
    trainer.run()
    kls = [point["kl"] for point in trainer.curve if "kl" in point]
    assert kls[-1] < 0.7 * kls[0]
    assert rows.rows_drawn["generated"] == rows.rows_drawn["noise"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_draft_is_initialised_with_layers_of_its_target(preset: str) -> None:
    teacher = model.build(PRESETS[preset].target, PRESETS[preset], 0)
    student = stages.new_draft(PRESETS[preset], teacher, 1)
    assert student.config.vocab_size == teacher.config.vocab_size
    same_width = student.config.hidden_size == teacher.config.hidden_size
    first, last = student.model.layers[0], student.model.layers[-1]
    chosen = [teacher.model.layers[index] for index in PRESETS[preset].distillation.layers]
    for own, source in zip((first, last), (chosen[0], chosen[-1]), strict=True):
        assert torch.equal(own.mlp.gate_proj.weight, source.mlp.gate_proj.weight) == same_width


def test_progress_is_the_larger_of_tokens_and_time(tmp_path: Path) -> None:
    trainer = target_run(tmp_path, replace(PLAN, minutes=1.0))
    assert trainer.progress == 0.0
    trainer.tokens = PLAN.max_tokens // 4
    assert trainer.progress == pytest.approx(0.25)
    trainer.elapsed = 45.0
    assert trainer.progress == pytest.approx(0.75)
    trainer.elapsed = 100.0
    assert trainer.progress == 1.0


def test_the_learning_rate_rises_stays_and_falls() -> None:
    plan = replace(PLAN, warmup=0.1, decay=0.4)
    factors = [optim.lr_factor(progress, plan) for progress in (0.05, 0.1, 0.5, 0.8, 1.0)]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.01])


def test_orthogonalise_equalises_singular_values() -> None:
    torch.manual_seed(0)
    for shape in ((2, 16, 48), (2, 48, 16)):
        values = torch.linalg.svdvals(optim.orthogonalise(torch.randn(shape), torch.float32))
        assert values.min() > 0.5
        assert values.max() < 1.5


def test_orthogonalise_in_16_bits_equalises_singular_values_that_are_far_apart() -> None:
    """The squares of these values exceed 16 bits: iterating on them would give singular values of 4 to 8."""
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(2, 64, 192), full_matrices=False)
    matrices = left * torch.logspace(0, -3, 64) @ right
    exact, found = (optim.orthogonalise(matrices, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert torch.linalg.svdvals(found).max() < 1.5
    assert torch.cosine_similarity(exact.flatten(), found.flatten(), 0) > 0.99


def test_a_target_grows_and_layers_are_dropped_for_whole_steps() -> None:
    net = model.build(replace(TINY.target, layers=8), TINY, 0)
    loss = model.GrowingExitLoss(model.LlamaDecoder(net), LayerSkip(max_drop=0.5), growth=Growth(exit_share=0.5, grow_at=0.4))
    drawn = torch.stack([loss.runs(16, step, 0.5) for step in range(800)])  # [steps, L, B]
    assert torch.equal(drawn, drawn[:, :, :1].expand_as(drawn))
    rates = [(2**0.5 - 1) * rate for rate in drop_rates(8, 0.5)]  # equation 3: S(t) = exp(t ln 2) - 1
    assert drawn.float().mean((0, 2)) == pytest.approx([1 - rate for rate in rates], abs=0.03)
    # nothing is dropped yet, and half of the layers are not added yet
    assert loss.runs(4, 7, 0.0).tolist() == [[True] * 4, [False] * 4] * 4
    assert [loss.exits(step, 0.3) for step in range(4)] == [[2], [4], [6], [2]]
    assert [loss.exits(step, 0.4) for step in range(3)] == [[1], [2], [3]]
    hidden, labels = torch.randn(4, 5, 64), torch.ones(4, 5, dtype=torch.long)
    with torch.no_grad():
        assert torch.equal(loss.exit_loss(hidden, labels), loss.decoder.token_loss(hidden[:2], labels[:2]))


def test_adding_layers_does_not_change_the_output() -> None:
    net = model.build(TINY.target, TINY, 0)
    ids = torch.arange(40)[None]
    decoder = model.LlamaDecoder(net)
    without = torch.tensor([[True], [False], [True]])
    half = decoder.logits(decoder.hidden_states(ids, without)[-1])
    assert torch.equal(half, decoder.logits(decoder.hidden_states(ids)[-1]))
    assert torch.allclose(half, net(ids).logits, atol=1e-5)


def random_text(rng: random.Random) -> str:
    """Return random UTF-8 text: letters of all planes, controls, spaces, newlines."""
    planes = [(0, 0x7F), (0x20, 0x7E), (0xA0, 0x2FFF), (0xE000, 0xFFFD), (0x1F300, 0x1FAFF), (0x20000, 0x2A6D0)]
    letters = [chr(rng.randint(*rng.choice(planes))) for _ in range(80)]
    return "".join(rng.choice([letter, letter, " ", "    ", "\n", "\t"]) for letter in letters)


def test_the_tokenizer_round_trips_any_text(tmp_path: Path) -> None:
    learned = tokenizer.train(iter([CODE * 3, "if x:\n" + "    y = 12\n" * 9 + "        z\n" * 9]), 320)
    learned.save_pretrained(tmp_path)
    tokenizer.write_config(tmp_path)
    loaded = tokenizer.load(tmp_path)
    sizes = tokenizer.token_bytes(loaded)
    rng = random.Random(5)
    for text in [CODE, "\r\n \x00 naïve 東京 🛰️", *(random_text(rng) for _ in range(200))]:
        ids = loaded.encode(text)
        assert loaded.decode(ids) == text
        assert sum(sizes[i] for i in ids) == len(text.encode())
    assert len(loaded.encode("4096")) == 4
    assert len(loaded.encode("    ")) == 1
    assert loaded.eos_token_id == loaded.pad_token_id == 0
    chat = loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|user|>\nhi\n<|assistant|>\n"


def write_xz(path: Path, documents: list[str]) -> None:
    """Write one corpus file."""
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.write("\n<|endoftext|>\n".join(documents) + "\n<|endoftext|>\n")


def test_benchmark_prompts_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, prompts = tmp_path / "corpus", tmp_path / "prompts"
    folder.mkdir()
    prompts.mkdir()
    (prompts / "HumanEval.jsonl").write_text("SECRET")
    write_xz(prompts / "books_en.txt.xz", ["SECRET"])
    write_xz(folder / "something_else.txt.xz", ["SECRET"])
    for source in corpus.SOURCES:
        if source.file:
            write_xz(folder / source.file, [f"# {source.name} {i}\n{CODE.replace('add', f'add{i}')}" for i in range(50)])
    monkeypatch.setattr(corpus, "read_stdlib", lambda: [f"# std {i}\n{CODE}" for i in range(50)])
    splits = corpus.load(folder, 1.0)
    assert set(splits) == {source.name for source in corpus.SOURCES}
    for name, found in splits.items():
        assert found.train, name
        assert found.held_out, name
        assert not set(found.train) & set(found.held_out)
        assert "SECRET" not in "".join(found.train + found.held_out)
    with pytest.raises(ValueError, match="must not be used for training"):
        corpus.read_documents(prompts / "books_en.txt.xz")


def test_clean_gsm8k_drops_the_calculator() -> None:
    text = corpus.clean_gsm8k("Question: How many?\nAnswer: 48/2 = <<48/2=24>>24.\n#### 24")
    assert "<<" not in text
    assert text.endswith("48/2 = 24.\nThe answer is 24.")


def test_acceptance_length_counts_rounds() -> None:
    matches = torch.tensor([[True, True, False, True, True, True]])
    mask = torch.ones_like(matches)
    # K = 2: (2 accepted + bonus), then (2 accepted + bonus): 6 tokens in 2 rounds.
    assert evaluate.mean_acceptance_length(matches, mask, 2) == 3.0
    assert evaluate.mean_acceptance_length(matches, mask, 1) == 1.5
    assert evaluate.mean_acceptance_length(torch.zeros_like(matches), mask, 4) == 1.0
    assert evaluate.before_end(torch.tensor([[5, 6, 0, 7, 0]]), 1, 0).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize(
    ("continuation", "valid"),
    [
        ("    return first\n", True),
        ("    return first\n\nclass Next(:\n", True),
        ("    return first\n    broken(", True),
        ("    return (\n", False),
        ("    first = 0\n    if first:\n        ret", True),  # cut by the token limit
        ("    first = 0\n    if first:\n", False),  # ended by itself
        ("    if first:\n        ret", False),  # nothing is left
        ("\n\n", False),
        ("return first\n", False),
    ],
)
def test_the_check_for_valid_python(continuation: str, valid: bool) -> None:
    assert samples.parses(samples.SIGNATURES[0], continuation) is valid


def test_there_are_fifty_signatures_and_ten_openings() -> None:
    assert len(set(samples.SIGNATURES)) == 50
    assert len(set(samples.ENGLISH)) == 10


def test_an_export_replaces_model_folders_only(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from recipes.family.__main__ import app

    work, mine = tmp_path / "work", tmp_path / "mine"
    (work / "target").mkdir(parents=True)
    (work / "target" / "checkpoint.pt").write_text("x")
    mine.mkdir()
    (mine / "notes.txt").write_text("not to be lost")
    options = ["--preset", "tiny", "--work", str(work)]
    for words, why in (
        (["target", str(mine)], "not a model folder"),
        (["head", "x"], "'head' is not one of 'target', 'loops', 'average', 'draft'"),
        (["draft", "x"], "no checkpoint"),
    ):
        done = CliRunner().invoke(app, ["export", *words, *options], env={"COLUMNS": "300"})
        assert done.exit_code == 2 and why in done.output
    assert (mine / "notes.txt").read_text() == "not to be lost"


def test_near_duplicates_of_held_out_or_earlier_text_are_dropped() -> None:
    tale = [f"Once upon a time there lived {who} in a small house." for who in ("a king", "a cat", "a boy", "an old woman")]
    other = [f"The {thing} of the village stood beside the river for years." for thing in ("mill", "church", "bridge")]
    splits = {
        "books": corpus.Split(["\n".join(tale).replace("O", "\u201cO"), "\n".join(other)], []),
        "tales": corpus.Split(["\n".join(tale)], []),
        "peps": corpus.Split(["\n".join(other[:2]), "short\nlines"], ["\n".join(other)]),
    }
    kept = corpus.without_duplicates(splits)
    assert {name: found.train for name, found in kept.items()} == {
        "tales": ["\n".join(tale)],  # kept here and dropped from the books, in any order
        "books": [],  # one is a tale, the other is held out in the peps
        "peps": ["short\nlines"],
    }


def test_conversations_follow_the_chat_template(tmp_path: Path) -> None:
    learned = tokenizer.train(iter([CODE * 3]), 320)
    turns = [("What is 2 + 3?", "2 + 3 = 5."), ("Thanks", "My pleasure.")]
    messages = [
        {"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    assert learned.apply_chat_template(messages, tokenize=False) == chats.document(turns) + "<|endoftext|>\n"


def test_conversations_contain_commands_stories_and_correct_sums() -> None:
    pages = ["# ls\n\n> List.\n\n- List [a]ll files in {{path}}:\n\n`ls {{[-a|--all]}} {{path}}`"]
    fable = "THE FOX\n\n" + "A fox saw some grapes and could not reach them. " * 6
    text = "\n".join(chats.write(pages, [fable]))
    assert "How do I list all files in path?\n<|assistant|>\nUse this command:\n`ls -a path`" in text
    assert "Tell me a story about the fox.\n<|assistant|>\nA fox saw some grapes" in text
    sums = re.findall(r"^(\d+) ([-+*]) (\d+) = (-?\d+)\.(?:<\|endoftext\|>)?$", text, flags=re.MULTILINE)
    assert len(sums) == chats.SUMS
    operations = {"+": operator.add, "-": operator.sub, "*": operator.mul}
    assert all(operations[kind](int(first), int(second)) == int(value) for first, kind, second, value in sums)


def test_templates_expand_to_agreeing_texts() -> None:
    rng = random.Random(0)
    found = {written.expand("«who=Tom|Ann» sat «down|». «who» slept.", rng) for _ in range(50)}
    assert found == {f"{who} sat {how}. {who} slept." for who in ("Tom", "Ann") for how in ("down", "")}
    for template, why in (("«who» sat.", "not defined"), ("«who=Tom|Ann» and «who=Tom|Ann»", "defined twice")):
        with pytest.raises(ValueError, match=why):
            written.expand(template, rng)
    assert written.conversation("USER:\nHi!\nASSISTANT:\nHello.\nUSER:\nBye\nASSISTANT:\nBye!") == chats.document(
        [("Hi!", "Hello."), ("Bye", "Bye!")]
    )
    assert written.request(CODE).startswith("<|user|>\nWrite a Python function: Return the sum.\n<|assistant|>\ndef add(")
    assert written.request("total = 1\n") == "total = 1\n"


@pytest.mark.parametrize("name", ["tales", "functions", "chats"])
def test_written_texts_are_whole_different_and_not_our_prompts(name: str) -> None:
    templates = written.templates(name)
    assert len(set(templates)) == len(templates) > 500
    train, held_out = written.texts(name)
    assert len(train) > 5 * len(templates) and held_out and not set(train) & set(held_out)
    assert not [text for text in train if "«" in text or "»" in text]
    openings = samples.SIGNATURES if name == "functions" else samples.ENGLISH
    assert not [text for text in train if any(opening.strip() in text for opening in openings)]


@pytest.mark.parametrize("part", range(4))
def test_written_functions_do_what_their_examples_say(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {signature.split("(")[0] for signature in samples.SIGNATURES}
    for template in written.templates("functions")[part::4]:
        text = written.expand(template, random.Random(part))
        assert not [line for line in text.splitlines() if line.split("(")[0] in prompts], text
        module = ModuleType("example")
        monkeypatch.setitem(sys.modules, "example", module)  # dataclasses look for theirs
        space = vars(module)
        exec(compile(text, "example", "exec"), space)
        for made in [each for each in space.values() if getattr(each, "__module__", None) == "example"]:
            for examples in doctest.DocTestFinder().find(made, "example", module=False, globs=space):
                assert doctest.DocTestRunner(verbose=False).run(examples, out=lambda _: None).failed == 0, text


def test_a_run_can_be_ended_early_with_its_decay(tmp_path: Path) -> None:
    shop = stages.Workshop("tiny", tmp_path, tmp_path, tokens_in_all=10_000)
    plan = shop.plan(TINY.target_plan)
    assert plan.max_tokens == 10_000 < TINY.target_plan.max_tokens
    assert optim.lr_factor(9_000 / plan.max_tokens, plan) < optim.lr_factor(9_000 / TINY.target_plan.max_tokens, plan)


def test_a_target_goes_on_from_a_finished_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "training_mixture", lambda folder, seed: None)
    finished = model.build(TINY.target, TINY, 7)
    finished.save_pretrained(tmp_path / "finished")
    shop = stages.Workshop("tiny", tmp_path, tmp_path / "work", compiled=False, start=tmp_path / "finished")
    for name, weight in stages.target_run(shop).model.state_dict().items():
        assert torch.equal(weight, finished.state_dict()[name]), name


def test_a_target_that_goes_on_keeps_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {each.name: corpus.Split(["def add(a, b):\n    return a + b\n"], ["held out"]) for each in corpus.SOURCES}
    monkeypatch.setattr(corpus, "load", lambda folder, megabytes: splits)
    stages.prepare(stages.Workshop("tiny", tmp_path, tmp_path / "work", start=PACKAGE / "target"))
    assert tokenizer.load(tmp_path / "work" / "tokenizer").get_vocab() == tokenizer.load(PACKAGE / "target").get_vocab()


@pytest.mark.parametrize(("command", "option"), [("target", "--start"), ("draft", "--target"), ("draft", "--start")])
def test_a_folder_without_a_model_is_refused(tmp_path: Path, command: str, option: str) -> None:
    from typer.testing import CliRunner

    from recipes.family.__main__ import app

    done = CliRunner().invoke(app, [command, "--preset", "tiny", option, str(tmp_path)], env={"COLUMNS": "300"})
    assert done.exit_code == 2 and "is not a model folder" in done.output


def test_a_resumed_run_has_the_start_of_the_interrupted_one(tmp_path: Path) -> None:
    shop = stages.Workshop("tiny", tmp_path, tmp_path, start=tmp_path / "one")
    shop.claim_start("draft")
    with pytest.raises(OutriderError, match="draft belongs to a run with other start"):
        stages.train_draft(replace(shop, start=tmp_path / "other"), tmp_path)
    for seed, folder in ((1, "target"), (2, "loops")):
        (tmp_path / folder).mkdir(exist_ok=True)
        weights = model.build(TINY.target, TINY, seed)
        torch.save({"model": weights.state_dict()}, tmp_path / folder / "checkpoint.pt")
    check_or_record_identity(tmp_path / "loops" / "run.json", {"target": fingerprint(weights)})
    with pytest.raises(OutriderError, match="loops belongs to a run with other target"):
        stages.train_against_loops(shop)


def test_a_draft_needs_a_finished_target_and_a_card_measurements(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from recipes.family.__main__ import app

    options = ["--preset", "tiny", "--corpus", str(tmp_path), "--work", str(tmp_path / "work")]
    done = CliRunner().invoke(app, ["draft", *options], env={"COLUMNS": "300"})
    assert done.exit_code == 2 and "no checkpoint in" in done.output and "recipes.family loops` first" in done.output
    done = CliRunner().invoke(app, ["card", "--preset", "tiny", "--curves", str(tmp_path)], env={"COLUMNS": "300"})
    assert done.exit_code == 2 and "no measurements in" in done.output and "recipes.family finish` first" in done.output


def test_repeats_are_the_tokens_of_a_loop_after_its_first_period_and_before_the_end() -> None:
    assert loops.repeats([9, 5, 6, 5, 6, 5, 6, 7], end=0) == [False] * 3 + [True] * 4 + [False]
    assert loops.repeats([5, 6, 5, 6], end=0) == [False] * 4  # two repetitions are not a loop
    assert loops.repeats([5, 5, 5, 5, 0, 5, 5, 5], end=0) == [False, True, True, True, False, False, False, False]


def test_unlikelihood_ends_greedy_loops() -> None:
    net = model.build(TINY.target, TINY, 1)
    torch.nn.init.normal_(net.model.embed_tokens.weight, std=0.3)  # tied: each token predicts itself
    text = EarlyExitLoss(model.LlamaDecoder(net), LayerSkip(), seed=1)
    loss = loops.LoopLoss(text, net, AgainstLoops(rows=4, prompt_tokens=8, new_tokens=16, every=2, weight=50.0))
    ids = torch.randint(3, 300, (4, 17), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    shares = []
    for step in range(60):
        total, parts = loss(ids, 2 * step, 2 * step, 0.5)
        shares.append(float(parts["loops"]))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    assert shares[0] > 0.5 and sum(shares[-20:]) / 20 < shares[0] / 2
    assert "loops" not in loss(ids, 1, 1, 0.5)[1]


def test_the_finished_target_is_the_mean_of_all_runs_against_loops(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from recipes.family.__main__ import app

    work, shop = tmp_path / "work", stages.Workshop("tiny", tmp_path, tmp_path / "work")
    weights = [{"a": torch.tensor([number, 2.0])} for number in (1.0, 4.0, 7.0)]
    folders = [work / "loops", tmp_path / "second", tmp_path / "third"]
    for folder, each in zip(folders, weights, strict=True):
        folder.mkdir(parents=True)
        torch.save({"model": each, "step": 9}, folder / "checkpoint.pt")
    assert stages.finished(shop) == "loops"
    others = [str(folder) for folder in folders[1:]]
    done = CliRunner().invoke(app, ["average", *others, "--preset", "tiny", "--work", str(work)])
    assert done.exit_code == 0, done.output
    assert stages.finished(shop) == "average"
    assert torch.load(work / "average" / "checkpoint.pt")["model"]["a"].tolist() == [4.0, 2.0]
    done = CliRunner().invoke(app, ["average", str(tmp_path), "--preset", "tiny", "--work", str(work)], env={"COLUMNS": "300"})
    assert done.exit_code == 2 and "no checkpoint" in done.output
