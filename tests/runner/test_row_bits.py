"""A token has the same bits in eager passes over any number of tokens, where all layers run on the kernels."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from outrider import native
from outrider.runner import ModelRunner, RunnerConfig

from .rounds import make_model, make_text, untouched
from .test_architectures import ARCHITECTURES, OWN_ATTENTION, small_config

pytestmark = pytest.mark.skipif(not native.load(), reason="no C++ compiler")
TEXT = make_text(40, 1)
# Not all layers run on the kernels: attention of the model's own code, and experts of these widths.
OTHERS = {"bloom", "diffllama", "doge", "falcon", "gptj", "mpt", "longcat_flash", "llama4_text", "jetmoe", "mimo_v2_flash"}
OTHERS |= {"mixtral", "qwen2_moe", "phimoe", "deepseek_v3", "gpt_oss"}


def logits_in_chunks(model: PreTrainedModel, *chunks: int) -> list[torch.Tensor]:
    """Return the text's last logits [V] after prefill in chunks of each size."""
    found = []
    for chunk in chunks:
        runner = ModelRunner.load(untouched(model), RunnerConfig(compile="never", prefill_chunk=chunk))
        assert runner.is_row_invariant, "not all layers run on the kernels"
        with torch.inference_mode():
            found.append(runner.extend(["a"], [TEXT])[0])
    return found


@pytest.mark.parametrize("model_type", [name for name in (*ARCHITECTURES, *OWN_ATTENTION) if name not in OTHERS])
def test_layers_of_any_width(model_type: str) -> None:
    """Widths of 48: rows end within a vector."""
    first, *others = logits_in_chunks(make_model(small_config(model_type)), 1, 7, 256)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu"])
def test_layers_that_torch_divides_among_threads(activation: str, three_threads: None) -> None:
    model = make_model(small_config("llama", intermediate_size=8960, hidden_act=activation))
    first, *others = logits_in_chunks(model, 1, 8, 256)
    assert all(torch.equal(first, other) for other in others)
