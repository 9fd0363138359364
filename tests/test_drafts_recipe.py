"""Recipe of a draft with its own vocabulary, initialised from the target's embeddings."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import typer
from tiny_folder import TEXT

import recipes
from outrider import LLM, SamplingParams, family
from outrider.train.shrink import shrink
from outrider.types import OutriderError
from recipes.drafts import foreign
from recipes.family import corpus, data, model, tokenizer
from recipes.family.config import PRESETS, Shape
from recipes.heads import rows

TINY = PRESETS["tiny"]
CODE = 'def add{0}(first, second):\n    """Return the sum."""\n    total = first + second * {0}\n    return total\n\n'


def test_each_embedding_is_the_mean_of_those_of_the_same_bytes():
    own, of_target = (tokenizer.train(iter([TEXT * 3 + " 東京"]), size) for size in (330, 290))
    table = foreign.pieces(own, of_target)
    assert torch.allclose(table.sum(1), torch.ones(len(own)))
    for index in range(len(own)):
        spelled = [piece for piece, share in enumerate(table[index].tolist()) if share]
        assert set(spelled) == set(of_target.encode(own.decode([index]))) or "\N{REPLACEMENT CHARACTER}" in own.decode([index])
    lone = own.convert_tokens_to_ids("æ")  # a byte that is not a character
    assert table[lone, of_target.convert_tokens_to_ids("æ")] == 1


def test_a_draft_with_another_vocabulary_starts_with_the_targets_embeddings():
    target = model.build(Shape(64, 3, 1, 1, 96), TINY, 1)
    torch.nn.init.normal_(target.model.embed_tokens.weight)
    draft = model.build(Shape(48, 1, 1, 1, 64), TINY, 2)
    swapped = torch.eye(TINY.vocab).flip(0)
    shrink(target, draft, (0,))
    plain = draft.model.embed_tokens.weight.clone()
    shrink(target, draft, (0,), swapped)
    assert torch.allclose(draft.model.embed_tokens.weight, plain.flip(0))


def test_it_is_trained_from_the_familys_text_and_drafts_for_the_embedded_target(tmp_path, monkeypatch):
    texts, work, out = (tmp_path / name for name in ("texts", "work", "out"))
    texts.mkdir()
    documents = ["".join(CODE.format(100 * at + part) for part in range(14)) for at in range(8)]
    for source in corpus.SOURCES:
        if source.file:
            with lzma.open(texts / source.file, "wt", encoding="utf-8") as file:
                file.write("\n<|endoftext|>\n".join(f"# {source.name}\n{text}" for text in documents))
    monkeypatch.setattr(corpus, "read_stdlib", lambda: documents)
    learned = foreign.prepare(work, texts, 1.0, 400, documents)
    assert foreign.prepare(work, texts, 1.0, 999, []).get_vocab() == learned.get_vocab()  # it is not trained again
    mixed = foreign.mixture(work / "tokens")
    assert mixed.names[-1] == "written" and abs(mixed.shares[-1] - 0.5) < 1e-9
    foreign.train(work, Path(family.__file__).parent, 0.002, out)
    measured = json.loads((out / "measured.json").read_text())
    assert measured["vocabulary"] == len(learned) < 4096 and 256 <= measured["tokens_in_common"] <= len(learned)
    prompt, params = "def add(first, second):\n", SamplingParams(max_tokens=12, ignore_eos=True)
    drafted = LLM(draft=str(out), method="cross-tokenizer", num_draft_tokens=3, compile="never")
    wanted = LLM(method="plain", compile="never").generate([prompt], params)[0].outputs[0]
    assert drafted.generate([prompt], params)[0].outputs[0].token_ids == wanted.token_ids
    assert drafted.stats.num_drafts > 0 and drafted.stats.faults == 0


def test_an_interruption_while_the_targets_text_is_tokenised_loses_none_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "load", lambda *_: {each.name: corpus.Split([TEXT], [TEXT]) for each in corpus.SOURCES})
    encode = data.encode
    with monkeypatch.context() as patch:
        patch.setattr(data, "encode", lambda *at: 1 / 0 if at[2].name == "train_written.bin" else encode(*at))
        with pytest.raises(ZeroDivisionError):
            foreign.prepare(tmp_path, tmp_path, 1.0, 320, [TEXT])
    foreign.prepare(tmp_path, tmp_path, 1.0, 320, [TEXT])
    assert "written" in foreign.mixture(tmp_path / "tokens").names


def test_rows_of_another_target_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows.data, "training_mixture", lambda *_: SimpleNamespace(batch=lambda *_: None))
    monkeypatch.setattr(rows.prompts, "mixed_prompts", lambda *_: torch.ones(4, rows.PROMPT_LEN))
    monkeypatch.setattr(rows, "regenerate", lambda _, part, *__: part)
    first, second = (SimpleNamespace(model=model.build(TINY.target, TINY, seed)) for seed in (1, 2))
    for _ in range(2):
        assert len(rows.training_rows(first, None, tmp_path, tmp_path, 4)) == 4
    with pytest.raises(OutriderError, match="belongs to a run with other target"):
        rows.training_rows(second, None, tmp_path, tmp_path, 4)


def test_a_user_error_in_a_recipe_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()

    @app.command()
    def wrong() -> None:
        raise OutriderError("folder missing: give another")

    with pytest.raises(SystemExit, match="2"), patch.object(sys, "argv", ["recipe"]):
        recipes.run(app)
    assert capsys.readouterr().err == "error: folder missing: give another\n"
