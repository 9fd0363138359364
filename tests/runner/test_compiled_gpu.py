"""What a GPU runs, as far as a CPU can show it: programs that inductor compiles into one file, and fused layers of torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from outrider import native
from outrider.runner import ModelRunner, RunnerConfig, compiled, compiled_gpu, linear
from outrider.runner.forward import Pass

from .rounds import make_model
from .test_architectures import small_config

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own warnings during compilation


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelRunner:
    """Return a runner of a model that is not packed, as on a GPU."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "serves", lambda device: False)
    model = make_model(small_config("qwen2", num_hidden_layers=2))
    return ModelRunner.load(model, RunnerConfig(compile="never"))


def one_token(stores: list[Tensor]) -> list[Tensor]:
    zero, one = torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.long)
    return [one[None] * 5, zero, zero[None], zero, zero, one, torch.ones(1, 1, 1, dtype=torch.bool), *stores]


def test_a_program_is_compiled_into_a_file_that_serves_passes_of_any_shape(runner: ModelRunner, tmp_path: Path) -> None:
    program = Pass(runner.model, runner.cache, (1,))
    compiled_gpu.build(compiled.export(program), tmp_path / "pass")
    run = compiled_gpu.load(program, tmp_path / "pass")
    example = list(program.example()[0])
    every_second = torch.stack((example[0], example[0]), -1)[..., 0]  # as slices of larger tensors are
    stores = example[7:]
    for inputs in (example, [every_second, *example[1:]], one_token(stores)):
        for got, expected in zip(run(inputs), program(*inputs), strict=True):
            torch.testing.assert_close(got, expected)


def test_fused_layers_give_the_same_logits(runner: ModelRunner) -> None:
    texts = [[3, 1, 4, 1, 5], [9, 2]]
    before = runner.extend(["a", "b"], texts)
    linear.fuse_siblings(runner.model)
    groups = [module for module in runner.model.modules() if isinstance(module, linear.FusedPlain)]
    assert [(len(group.sizes), group.bias is not None) for group in groups] == [(3, True), (2, False)] * 2
    assert not [name for name, module in runner.model.named_modules() if type(module) is nn.Linear and "q_proj" in name]
    torch.testing.assert_close(runner.extend(["c", "d"], texts), before)
