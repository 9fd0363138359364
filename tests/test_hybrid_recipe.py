"""Recipe of the small hybrid: it learns, and the exported model runs in Outrider with drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_folder import make_tokenizer

from outrider import LLM, SamplingParams
from outrider.train.plan import TrainingPlan
from recipes.family import data
from recipes.family.model import write
from recipes.hybrid import __main__ as recipe

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.mark.filterwarnings("ignore")  # transformers warns of missing kernels
def test_the_hybrid_learns_and_runs(tmp_path: Path) -> None:
    plan = TrainingPlan(24_000, 512, ((1.0, 32),), muon_lr=0.02, warmup=0.0, eval_every_s=1e9, save_every_s=1e9)
    model = recipe.build(320, plan.seed, **TINY)
    assert model.config.layer_types.count("linear_attention") == 3
    stream = np.tile(np.arange(3, 67, dtype=np.uint16), 40)
    trainer = recipe.training(model, data.Mixture({"pattern": stream}, {"pattern": 1.0}, plan.seed), plan, tmp_path)
    trainer.run()
    losses = [point["loss"] for point in trainer.curve]
    assert losses[-1] < 0.5 * losses[0]
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write(model, tmp_path / "tokenizer", tmp_path / "model")
    prompt, params = list(range(10, 40)), SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    texts = []
    for method in ("plain", "low-bit"):
        llm = LLM(tmp_path / "model", method=method, num_draft_tokens=4, compile="never")
        texts.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]
    assert llm.stats.num_accepted > 0
