"""Loading: unsupported models give one-line errors; weights are kept once, and a user's model is unchanged."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_folder import make_folder
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, BertConfig

from outrider import LLM, SamplingParams
from outrider.cli import main
from outrider.runner import ModelRunner, RunnerConfig, attention, checkpoint_files, kernels, loading, self_check
from outrider.runner.kv_cache import PassThrough
from outrider.runner.linear import PackedEmbedding, is_packed
from outrider.types import OutriderError

from .rounds import Rounds, force_reference, make_model, make_text, plain_logits, untouched
from .test_architectures import DECODER, small_config

EAGER = RunnerConfig(compile="never")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def broken(folder, tmp_path):
    """Copy a valid folder for a test to break."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def refusal(source, config=EAGER) -> str:
    with pytest.raises(OutriderError) as error:
        ModelRunner.load(source, config)
    line = str(error.value)
    assert line
    assert "\n" not in line
    return line


def test_a_missing_folder(tmp_path):
    for source in (tmp_path / "none", "./no-such-folder"):
        assert refusal(source).startswith(f"no model folder '{source}': expected a folder, a .gguf file or")


def test_a_folder_without_a_config(tmp_path):
    assert "config.json is missing" in refusal(tmp_path)


def test_a_file_instead_of_a_folder(folder):
    assert "config.json is a file: give the folder" in refusal(folder / "config.json")


def test_a_config_with_invalid_json_or_an_unknown_type(broken):
    for text in ("{", "[" * 100_000):
        (broken / "config.json").write_text(text)
        assert "config.json is not JSON" in refusal(broken)
    (broken / "config.json").write_text('{"model_type": "no_such_type"}')
    assert "no_such_type" in refusal(broken)


def test_a_config_that_is_a_folder(broken):
    (broken / "config.json").unlink()
    (broken / "config.json").mkdir()
    assert "cannot read the config of" in refusal(broken)


def test_no_weights(broken):
    (broken / "model.safetensors").unlink()
    said = f"{broken} has no weights: expected model.safetensors or pytorch_model.bin"
    assert refusal(broken) == said


def test_an_adapter_and_files_of_other_names_are_no_weights(broken):
    (broken / "model.safetensors").rename(broken / "model-00001-of-00001.safetensors")
    assert refusal(broken) == f"{broken} has no weights: expected model.safetensors or pytorch_model.bin"
    (broken / "model-00001-of-00001.safetensors").rename(broken / "adapter_model.safetensors")
    (broken / "adapter_config.json").write_text("{}")
    assert f"{broken} has no weights: it is an adapter (LoRA); merge it" in refusal(broken)


def test_the_file_that_the_config_names_is_loaded_and_no_other(broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"transformers_weights": "own.safetensors"}))
    assert refusal(broken) == f"{broken} has no weights: expected own.safetensors, which config.json names"
    (broken / "model.safetensors").rename(broken / "own.safetensors")
    assert LLM(broken, compile="never").generate([[1, 2]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids


@pytest.mark.parametrize("keep", [0, 5, 0.5, 0.999])
def test_truncated_weights(broken, keep):
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: int(keep * len(data)) if keep < 1 else keep])
    what = "is incomplete, it has" if keep in (0.5, 0.999) else "is not a safetensors file, it begins with"
    assert refusal(broken).startswith(f"{broken / 'model.safetensors'} {what}") and refusal(broken).endswith(
        "download it again"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (bytes(range(256)) * 40, "is not a safetensors file, it begins with b'\\x00"),
        (b"<!DOCTYPE html><html>", "is not a safetensors file, it begins with b'<!DOCTYPE html><': download it again"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "is a pointer of Git LFS, not the weights: run git lfs pull"),
        (b"\x05" + bytes(7) + b"{} []", "is not a safetensors file, its header is broken"),
        (b"\x0a" + bytes(7) + b'{"a": 1   }', "is not a safetensors file, its header is broken"),
        (b"\x21" + bytes(7) + b'{"a": {"data_offsets": [0, "4"]}}', "is not a safetensors file, its header is broken"),
        (b"\x22" + bytes(7) + b'{"a": {"data_offsets": [0, null]}}', "is not a safetensors file, its header is broken"),
        (b"\x20\xa1\x07" + bytes(5) + b'{"a":' * 100_000, "is not a safetensors file, its header is broken"),
    ],
)
def test_another_file_as_weights(broken, content, said):
    (broken / "model.safetensors").write_bytes(content)
    assert refusal(broken).startswith(f"{broken / 'model.safetensors'} {said}")


def test_a_header_that_is_too_long_is_not_read(broken, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "MAX_HEADER_BYTES", 100)
    assert (
        refusal(broken) == f"{broken / 'model.safetensors'} is not a safetensors file, its header is broken: download it again"
    )


@pytest.mark.parametrize("outside", ["/etc/hostname", "../model.safetensors", "sub/../../x.safetensors"])
def test_weights_outside_the_folder_are_refused(broken, outside):
    (broken / "model.safetensors").rename(broken.parent / "model.safetensors")
    index = broken / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": outside}}))
    said = "{} names weights outside its folder, {}: expected the name of a file in it"
    assert refusal(broken) == said.format(index, outside)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"transformers_weights": outside}))
    assert refusal(broken) == said.format(broken / "config.json", outside)


@pytest.mark.parametrize(
    "config, said",
    [
        ({"model_type": "gpt2", "n_layer": 10**9}, "n_layer=1000000000: expected a whole number from 1 to 10000"),
        ({"model_type": "mixtral", "num_local_experts": 10**9}, "num_local_experts=1000000000: expected a whole number from 0"),
        ({"model_type": "mpt", "n_layers": 10**9}, "n_layers=1000000000"),
    ],
)
def test_sizes_under_other_names_are_checked(tmp_path, config, said):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OutriderError, match=f"the config of .* says {said}"):
        loading.load_config(tmp_path)


@pytest.mark.parametrize("text", ['{"weight_map": ', "[" * 100_000], ids=["cut", "nested"])
def test_a_broken_index_of_shards(broken, text):
    (broken / "model.safetensors").rename(broken / "model-00001-of-00001.safetensors")
    (broken / "model.safetensors.index.json").write_text(text)
    assert refusal(broken).startswith(f"{broken / 'model.safetensors.index.json'} is not a weight index: ")


def test_a_broken_index_of_a_format_that_is_not_loaded(broken):
    (broken / "pytorch_model.bin.index.json").write_text('{"weight_map": ')
    ModelRunner.load(broken, EAGER)


def test_an_adapter_instead_of_a_model(broken):
    (broken / "config.json").rename(broken / "adapter_config.json")
    assert "it is an adapter (LoRA); merge it into its model first" in refusal(broken)


def test_missing_weights_raise_instead_of_being_random(broken):
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 of the model's tensors, the first model.layers.1.mlp.up_proj.weight" in refusal(broken)


@pytest.mark.parametrize(
    "name, said",
    [
        (
            "self_attn.o_proj.weight_scale",
            "is quantised (model.layers.1.self_attn.o_proj.weight_scale), but its config.json has",
        ),
        ("mlp.up_proj.bias", "do not match its config: model.layers.1.mlp.up_proj.bias belongs to a layer without a bias"),
    ],
)
def test_tensors_of_a_layer_that_would_be_dropped(broken, name, said):
    weights = load_file(broken / "model.safetensors")
    weights[f"model.layers.1.{name}"] = torch.ones(16)
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert said in refusal(broken)


def test_weights_of_another_shape(broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 32}))
    assert (
        f"the weights in {broken} do not match its config: model.layers.0.mlp.down_proj.weight is [16, 24], expected [16, 32]"
        in (refusal(broken))
    )


@pytest.mark.parametrize(
    "change, reason",
    [
        (
            {"num_attention_heads": 8},
            r"do not match its config: model.layers.0.self_attn.o_proj.weight is \[16, 32\], expected \[16, 64\]",
        ),
        ({"num_attention_heads": 0}, "num_attention_heads=0: expected a whole number from 1 to"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0: expected"),
        ({"num_attention_heads": [4, 4]}, "'num_attention_heads' expected int, got list"),
        ({"num_attention_heads": "4"}, "'num_attention_heads' expected int, got str"),
        ({"hidden_size": 16.5}, "hidden_size=16.5: expected"),
        ({"max_position_embeddings": -5}, "max_position_embeddings=-5: expected"),
        ({"num_hidden_layers": 1}, "do not match its config: model.layers.1.*belongs to no layer, expected 1 layers"),
        ({"num_hidden_layers": 3}, "lacks 9 of the model's tensors, the first model.layers.2"),
        ({"vocab_size": 400}, r"model.embed_tokens.weight is \[320, 16\], expected \[400, 16\]"),
        ({"hidden_act": "nope"}, "is not valid: unknown hidden_act 'nope'"),
        ({"model_type": ["llama"]}, "cannot read the config"),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            "num_attention_heads=4 and num_key_value_heads=3: expected a di",
        ),
        ({"dtype": "float12"}, "says dtype='float12': expected a dtype such as bfloat16"),
        ({"dtype": None, "torch_dtype": "tensor"}, "says dtype='tensor': expected a dtype such as bfloat16"),
        ([1, 2], "config.json must be an object, got a list"),
    ],
)
def test_an_invalid_config_gives_a_one_line_error(broken, change, reason, capfd):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | change if isinstance(change, dict) else change))
    assert re.search(reason, refusal(broken))
    with pytest.raises(OutriderError, match=reason):
        LLM(broken)
    assert not re.search("MISMATCH|MISSING|UNEXPECTED", "".join(capfd.readouterr()))  # without a report of transformers


def test_the_command_line_exits_with_2_for_an_invalid_config(broken, capsys):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_attention_heads": 0}))
    assert main(["generate", "--target", str(broken), "hello"]) == 2
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == ["loading", "error:"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_numbers(broken, value):
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"][3, 4] = value
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert "q_proj.weight contain NaN or infinity" in refusal(broken)


@pytest.mark.parametrize("model_type", ["bert", "t5", "bart", "vit", "rwkv", "deepseek_v32", "xlnet", "recurrent_gemma"])
def test_models_of_other_kinds_are_rejected_before_weights_are_read(model_type, tmp_path, monkeypatch):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("weights were read"))
    assert model_type.split("_")[0] in refusal(tmp_path).lower()


def test_unsupported_attention_is_rejected():
    refused = refusal(make_model(small_config("bigbird_pegasus", **DECODER)))
    assert "needs bidirectional attention, which Outrider's cache does not support; run it with transformers'" in refused


def test_objects_other_than_language_models_are_rejected():
    assert "no language model head" in refusal(AutoModel.from_config(small_config("llama")))
    bert = BertConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    assert "bidirectional" in refusal(AutoModel.from_config(bert))
    assert "invalid model of type Linear" in refusal(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"dtype": "int8"}, "invalid dtype 'int8': expected auto, bfloat16, float16 or float32"),
        ({"dtype": "fp16"}, "invalid dtype 'fp16'"),
        ({"dtype": "Tensor"}, "invalid dtype 'Tensor'"),
        ({"compile": "yes"}, "invalid compile 'yes': expected auto, always or never"),
        ({"max_batch": 0}, "at least 1"),
        ({"max_len": 1}, "invalid max_len 1: expected a whole number, at least 2 or None"),
        ({"prefill_chunk": 0}, "at least 1"),
    ],
)
def test_settings_out_of_range(setting, message):
    with pytest.raises(OutriderError, match=message):
        RunnerConfig(**setting)


@pytest.mark.parametrize("device", ["cuda:77", "mps", "xpu"])
def test_a_device_that_this_machine_lacks(folder, device):
    assert refusal(folder, RunnerConfig(device=device)).startswith(f"device {device} is not available: ")


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_16_bit_checkpoint_is_computed_in_float32_unless_bfloat16_is_faster(dtype, tied, tmp_path):
    make_folder(tmp_path, dtype="bfloat16", tie_word_embeddings=tied)
    runner = ModelRunner.load(tmp_path, RunnerConfig(compile="never", dtype=dtype))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype, "auto")).float()
    rounds = Rounds(runner, model, [make_text(5, 0), make_text(30, 1)])
    in_pairs = dtype in ("auto", "bfloat16") and kernels.has_fast_bfloat16()
    assert runner.dtype == (torch.bfloat16 if in_pairs else torch.float32)
    rounds.step([[5, 6], [7]], [[0], []], [1, 2])
    rounds.step([[5, 6], [7]], [[0], []], [1, 2])


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_users_model_is_unchanged(model_type, dtype):
    model = make_model(small_config(model_type, tie_word_embeddings=True), attention="sdpa").to(dtype).train()
    text = make_text(20, 0)
    model.eval()
    before, state = plain_logits(model, text), copy.deepcopy(model.state_dict())
    model.train()
    names = [(name, type(module)) for name, module in model.named_modules()]
    storage = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    runner = ModelRunner.load(model, EAGER)
    Rounds(runner, make_model(small_config(model_type)), [text], tolerance=1e9).step([[1, 2]], [[0]], [3])
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert [(name, type(module)) for name, module in model.named_modules()] == names
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == storage
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    model.eval()
    assert torch.equal(plain_logits(model, text), before)


def test_without_packing_a_users_weights_are_shared_not_copied(monkeypatch):
    force_reference(monkeypatch)
    model = make_model(small_config("llama"))
    runner = ModelRunner.load(model, EAGER)
    ours = dict(runner.model.named_parameters())
    assert all(ours[name].data_ptr() == parameter.data_ptr() for name, parameter in model.named_parameters())


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt2"])
def test_a_table_tied_to_the_head_is_kept_once(model_type):
    model = make_model(small_config(model_type, tie_word_embeddings=True)).bfloat16()
    runner = ModelRunner.load(untouched(model), EAGER)
    table = model.get_input_embeddings().weight
    found = [m for m in runner.model.modules() if isinstance(m, PackedEmbedding)]
    assert len(found) == 1
    assert not [p for p in runner.model.parameters() if p.shape == table.shape]
    ids = torch.arange(table.shape[0])[None]
    with torch.no_grad():
        expected = model.get_input_embeddings()(ids).float()
    torch.testing.assert_close(found[0](ids), expected, rtol=2**-8, atol=0)  # a scaled table is rounded by transformers
    Rounds(runner, model.float(), [make_text(20, 0)]).step([[1, 2]], [[0]], [3])


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_model_that_has_no_parameter_left_when_packed_runs(weights):
    """OLMo's norms have no weights: nothing may ask the model's parameters for its device or dtype."""
    model = make_model(small_config("olmo", tie_word_embeddings=False))
    runner = ModelRunner.load(untouched(model), RunnerConfig(compile="never", weights=weights))
    assert not list(runner.model.parameters())


def test_every_weight_is_kept_once(folder):
    model = make_model(small_config("llama", hidden_size=64, head_dim=32, intermediate_size=96)).bfloat16()
    packed = ModelRunner.load(untouched(model), EAGER).model
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [*packed.parameters(), *packed.buffers()]}
    padding = 2 * 64 * (96 - model.config.vocab_size)  # the packed head consists of whole panels
    small = sum(4 * p.numel() for p in model.parameters() if p.ndim == 1)
    assert sum(kept.values()) <= sum(2 * p.numel() for p in model.parameters() if p.ndim > 1) + padding + small + 4096


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "bfloat16"}, "invalid dtype 'bfloat16' for a loaded model in float32: omit it"),
        ({"device": "cuda"}, "invalid device 'cuda' for a loaded model on cpu: omit it"),
        ({"device": "cuda:1"}, "invalid device 'cuda:1' for a loaded model on cpu"),
    ],
)
def test_a_loaded_model_is_not_converted(options, said):
    model = make_model(small_config("llama"))
    assert refusal(model, RunnerConfig(compile="never", **options)).startswith(said)
    ModelRunner.load(model, RunnerConfig(compile="never", dtype="float32", device="cpu"))


def test_a_loaded_model_on_several_devices_is_refused():
    model = make_model(small_config("llama"))
    model.lm_head.to("meta")
    assert refusal(model, EAGER).startswith("the loaded model is spread over cpu, meta: expected one device")


def test_a_device_of_another_type_than_cpu_and_cuda_is_refused(folder):
    wanted = "device meta is not supported: expected cpu, cuda or a numbered GPU"
    assert refusal(folder, RunnerConfig(device="meta")).startswith(wanted)
    assert refusal(make_model(small_config("llama")).to("meta"), EAGER).startswith(wanted)


def test_two_runners_of_one_model_are_independent():
    model = make_model(small_config("llama"))
    first, second = (Rounds(ModelRunner.load(model, EAGER), model, [make_text(9, seed)]) for seed in (1, 2))
    for _ in range(3):
        first.step([[1, 2]], [[0]], [3])
        second.step([[4]], [[0]], [5])


class Quantised(torch.Tensor):
    """A weight as torchao's ``quantize_`` returns it: only products with it are supported."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is functional.linear:
            x, weight, *bias = args
            return functional.linear(x, weight.as_subclass(torch.Tensor), *bias)
        if func in (torch.Tensor.view, torch.Tensor.reshape, functional.pad, torch.Tensor.copy_):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_model_with_tensor_subclass_weights_runs_unpacked():
    model = make_model(small_config("llama"))
    for layer in model.modules():
        if type(layer) is torch.nn.Linear:
            layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Quantised), requires_grad=False)
    rounds = Rounds(ModelRunner.load(model, EAGER), model, [make_text(20, 1)])
    rounds.step([[1, 2, 3]], [[0]], [4])
    rounds.step([[1, 2, 3]], [[]], [4])
    assert not is_packed(rounds.runner.model)


@pytest.mark.filterwarnings("ignore")
def test_layers_with_one_scale_per_pass_are_rejected():
    model = make_model(small_config("llama"))
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    assert "one scale for all tokens of a pass" in refusal(quantised)


def test_a_model_with_wrong_positions_fails_the_self_check(monkeypatch):
    """The self-check compares passes over the cache with the model's own forward."""
    config = small_config("bart", d_model=32, decoder_layers=2, decoder_attention_heads=4, is_encoder_decoder=False)
    model = make_model(config)
    monkeypatch.setattr(PassThrough, "get_seq_length", lambda *_: 0)  # as an earlier version of the cache did
    assert "gives different logits with Outrider's cache than without a cache (" in refusal(model)
    ModelRunner.load(model, RunnerConfig(compile="never", self_check=False))


@pytest.mark.parametrize("max_batch", [1, 2, 8])
@pytest.mark.parametrize("max_len", [None, 2, 9])
def test_the_self_check_leaves_cache_and_model_unchanged(max_batch, max_len):
    model = make_model(small_config("mistral", sliding_window=4))
    runner = ModelRunner.load(model, RunnerConfig(compile="never", max_batch=max_batch, max_len=max_len))
    assert runner.model.config._attn_implementation == attention.NAME
    assert sorted(runner.cache.row(f"r{index}") for index in range(max_batch)) == list(range(max_batch))
    assert runner.cache.cached_lens == [0] * max_batch
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(("kind", "dtype"), [("mixtral", "bfloat16"), ("mixtral", "float32"), ("mistral", "bfloat16")])
@pytest.mark.parametrize("num_different", [1, 5, 8])
def test_the_self_check_reads_more_texts_only_for_mixtures_in_16_bits(kind, dtype, num_different, monkeypatch):
    """Whose router, near a tie, may choose another expert than without a cache, in some texts."""
    texts, own_logits = [], self_check._own_logits

    def with_other_experts(model, ids, own_attention):
        texts.append(ids.tolist())
        logits = own_logits(model, ids, own_attention)
        return logits + 1 if len(texts) <= num_different else logits

    monkeypatch.setattr(self_check, "_own_logits", with_other_experts)
    model = make_model(small_config(kind)).to(getattr(torch, dtype))
    if (kind, dtype) == ("mixtral", "bfloat16") and num_different < 8:
        ModelRunner.load(model, EAGER)
        assert len(texts) == num_different + 1
    else:
        assert "gives different logits with Outrider's cache than without a cache (prompts, 7 tokens from 0" in refusal(model)
        assert len(texts) == (8 if (kind, dtype) == ("mixtral", "bfloat16") else 1)
    assert len({tuple(text[0]) for text in texts}) == len(texts)


@pytest.mark.parametrize("kind", ["mistral", "mixtral"])
@pytest.mark.parametrize("wrong", ["window", "logits"])
def test_the_self_check_detects_wrong_passes(kind, wrong, monkeypatch):
    model = make_model(small_config(kind, sliding_window=4))
    if kind == "mixtral":  # whose routers may differ in bfloat16
        model.to(torch.bfloat16)
    if wrong == "window":
        monkeypatch.setattr(attention, "range_of", lambda *_: attention.AttentionRange())
    else:
        monkeypatch.setattr("outrider.runner.forward.keeps_logits", lambda _: True)
        forward = type(model).forward
        monkeypatch.setattr(type(model), "forward", lambda self, logits_to_keep=0, **inputs: forward(self, **inputs))
    assert re.search("gives different logits with Outrider's cache|fails when it runs", refusal(model))


class WithKeys:
    def forward(self, input_ids, position_ids=None, attention_mask=None, past_key_values=None): ...


class WithKeysRenamed:
    _is_stateful = True  # has recurrent layers, too

    def forward(self, input_ids, position_ids=None, attention_mask=None, cache=None): ...


class Recurrent:
    def forward(self, input_ids, attention_mask=None, cache_params=None): ...


class RecurrentRenamed:
    _is_stateful = True

    def forward(self, input_ids, attention_mask=None, cache=None): ...


class RecurrentWithoutMask:
    _is_stateful = False

    def forward(self, input_ids, cache=None): ...


@pytest.mark.parametrize(
    ("kind", "name", "takes_mask"),
    [
        (WithKeys, "past_key_values", True),
        (WithKeysRenamed, "cache", True),
        (Recurrent, "cache_params", False),
        (RecurrentRenamed, "cache", False),
        (RecurrentWithoutMask, "cache", False),
    ],
)
def test_the_cache_has_the_name_that_the_release_gives_it(kind, name, takes_mask):
    """transformers 5.24 renamed ``past_key_values`` and ``cache_params`` to ``cache``."""
    past = object()
    arguments = loading.pass_arguments(kind(), past, torch.zeros(1, 2, dtype=torch.long), by_request=False)
    assert arguments[name] is past
    assert arguments.keys() == {name, "position_ids", "use_cache"} | ({"attention_mask"} if takes_mask else set())


def test_a_model_is_inspected_once_and_not_for_each_pass(monkeypatch):
    class Model(WithKeys): ...

    Model.forward = lambda self, input_ids, past_key_values=None, logits_to_keep=0: None
    for _ in range(2):
        assert loading.keeps_logits(Model()) and loading.cache_argument(Model()) == "past_key_values"
        monkeypatch.setattr(loading.inspect, "signature", None)


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_mixture_whose_config_asks_for_a_loss_of_its_routers_runs(is_folder, tmp_path):
    model = make_model(small_config("mixtral", output_router_logits=True))
    if is_folder:
        model.save_pretrained(tmp_path)
    runner = ModelRunner.load(tmp_path if is_folder else model, RunnerConfig(compile="never"))
    text = make_text(9, 1, 60)
    logits = runner.extend(["r"], [text])
    model.config.output_router_logits = False
    torch.testing.assert_close(logits[0], plain_logits(model, text)[-1], rtol=1e-4, atol=1e-4)


def test_the_users_config_keeps_its_loss_of_routers():
    model = make_model(small_config("mixtral", output_router_logits=True))
    ModelRunner.load(model, RunnerConfig(compile="never"))
    assert model.config.output_router_logits


def test_a_head_called_decoder_is_not_the_language_model():
    model = make_model(small_config("modernbert-decoder"))
    runner = ModelRunner.load(untouched(model), RunnerConfig(compile="never"))
    text = make_text(9, 1, 60)
    torch.testing.assert_close(runner.extend(["r"], [text])[0], plain_logits(model, text)[-1], rtol=1e-4, atol=1e-4)
    assert loading.find_decoder_layers(model) is not None


def test_a_config_with_every_field_of_older_releases_is_no_encoders(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "dumped")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "dumped" / "config.json").write_text(json.dumps(config | {"is_decoder": False}))
    assert ModelRunner.load(tmp_path / "dumped", RunnerConfig(compile="never")).num_layers == config["num_hidden_layers"]


@pytest.mark.parametrize(("factor", "expected"), [(4.0, 256), (1.0, 80), (None, 80)])
def test_yarn_that_a_user_adds_extends_the_context(factor, expected):
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    config = small_config("qwen3", max_position_embeddings=80, **({} if factor is None else {"rope_parameters": rope}))
    assert loading.context_length(config) == expected
