"""Quantised checkpoints: exact values of every format, output independent of drafts, and one-line errors."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from quantised_folders import FORMATS, Written, gptq, write, write_experts
from safetensors.torch import load_file, save_file
from toy import outputs_of

from outrider import LLM, SamplingParams, native
from outrider.cli import main
from outrider.runner import ModelRunner, RunnerConfig, blocks, linear, loading
from outrider.runner.checkpoints import formats
from outrider.runner.checkpoints.stored import StoredLinear
from outrider.runner.checkpoints.weight import QuantizedWeight
from outrider.types import OutriderError

from .rounds import make_text, plain_logits

pytestmark = pytest.mark.skipif(not native.load(), reason="no C++ compiler")
CPU = torch.device("cpu")
EAGER = RunnerConfig(compile="never")


def written(tmp_path, name, **options) -> Written:
    quantization, write_layer = FORMATS[name]
    return write(tmp_path / name, quantization, write_layer, **options)


def loaded(folder):
    config = loading.load_config(folder)
    reader = formats.choose(str(folder), formats.quantization_of(config), CPU)
    return loading.load_model(folder, config, "auto", CPU, reader=reader)


@pytest.mark.parametrize("name", FORMATS)
def test_dequantised_values_equal_the_format_exactly(name, tmp_path):
    made = written(tmp_path, name)
    model = loaded(made.folder)
    stored = {key: module.read() for key, module in model.named_modules() if isinstance(module, StoredLinear)}
    assert stored.keys() == made.values.keys()
    for key, weight in stored.items():
        values = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight.float()
        assert torch.equal(values, made.values[key]), key
        if isinstance(weight, QuantizedWeight):
            assert (weight.order is not None) == ("by-activation" in name or name == "gptq-8-asym")
        else:  # 16 bits only if they represent every value exactly
            assert weight.dtype == (torch.bfloat16 if name == "fp8-powers" else torch.float32)
    assert model.lm_head.weight.dtype == torch.float16  # as in the file
    assert linear.is_plain(model) and not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("name", FORMATS)
def test_packed_layers_have_the_formats_values(name, tmp_path):
    made = written(tmp_path, name)
    runner = ModelRunner.load(made.folder, EAGER)
    found = packed_values(runner.model)
    assert found.keys() >= made.values.keys()
    for key, values in made.values.items():
        assert torch.equal(found[key], values), key
    if "fp4" in name:  # float32 holds a product of scales, 16 bits a power of two and E4M3 times a power of two
        layers = [layer for layer in linear.packed_layers(runner.model) if blocks.is_blocks(layer.packed)]
        bits = {8 * (layer.packed[0].nbytes - blocks.HEADER) / (32 * blocks.shape_of(layer.packed)[1]) for layer in layers}
        assert bits == {{"mxfp4": 4.5, "nvfp4-powers": 5.0}.get(name, 6.0)}
        assert {blocks.form_of(layer.packed).codes for layer in layers} == {"float4"}


def packed_values(model):
    """Return the weights of packed layers, by the layers' names before fusing."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, linear.FusedSlice):
            group = module._group[0]
            found[name] = linear.weight_of(group).split(group.sizes)[module.index]
        elif isinstance(module, linear.PackedLinear):
            found[name] = linear.weight_of(module)
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "name", ["gptq-by-activation", "awq", "w4a16-asym", "w8a8", "fp8-qwen", "mxfp4", "nvfp4", "nvfp4-modelopt"]
)
def test_logits_equal_those_of_the_dequantised_model(name, kind, tmp_path):
    made = written(tmp_path, name, kind=kind)
    runner = ModelRunner.load(made.folder, EAGER)
    text = make_text(30, 1)
    expected = plain_logits(made.model, text)[-1]
    got = runner.extend(["a"], [text])[0]
    assert (got - expected).norm() < 0.04 * expected.norm()


PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
PROMPTS = [[7, 3, 9], [(5 * i * i + i) % 60 + 1 for i in range(45)], [(3 * i) % 11 + 1 for i in range(30)], [4]]


def tokens_of(llm, params=PARAMS):
    return [completion.token_ids for completion in outputs_of(llm.generate(PROMPTS, params))]


@pytest.mark.parametrize(
    "name", ["gptq-by-activation", "awq", "w4a16-asym", "w8a8", "fp8-qwen", "mxfp4", "nvfp4", "nvfp4-modelopt"]
)
def test_drafts_do_not_change_the_output(name, tmp_path):
    folder = written(tmp_path, name).folder
    draft = written(tmp_path / "draft", name, num_hidden_layers=1).folder  # quantised in the same way
    expected = tokens_of(LLM(folder, method="plain", compile="never", max_batch=1))
    for given, batch, k in itertools.product(({"method": "ngram"}, {"draft": draft}), (1, 4), (1, 4, 8)):
        llm = LLM(folder, num_draft_tokens=k, compile="never", max_batch=batch, **given)
        assert tokens_of(llm) == expected
        assert llm.stats.num_drafts > 0 and llm.stats.faults == 0


def broken(made, change):
    """Change the tensors of a checkpoint in place."""
    tensors = load_file(made.folder / "model.safetensors")
    change(tensors)
    save_file(tensors, made.folder / "model.safetensors", metadata={"format": "pt"})


LAYER = "model.layers.1.mlp.down_proj"


def missing(key):
    return lambda tensors: tensors.pop(f"{LAYER}.{key}")


def renamed(key, new):
    return lambda tensors: tensors.update({f"{LAYER}.{new}": tensors.pop(f"{LAYER}.{key}")})


def changed(key, change):
    return lambda tensors: tensors.update({f"{LAYER}.{key}": change(tensors[f"{LAYER}.{key}"]).contiguous()})


WRONG = {
    "gptq no codes": ("gptq", missing("qweight"), f"lacks 1 of the model's tensors, the first {LAYER}.weight"),
    "gptq no scales": ("gptq", missing("scales"), f"the checkpoint lacks {LAYER}.scales"),
    "gptq renamed zeros": ("gptq", renamed("qzeros", "zeros"), f"the checkpoint lacks {LAYER}.qzeros"),
    "gptq cut codes": ("gptq", changed("qweight", lambda t: t[:-1]), f"{LAYER}.qweight is [31, 128], expected [32, 128]"),
    "gptq cut outputs": ("gptq", changed("qweight", lambda t: t[:, 1:]), f"{LAYER}.qweight is [32, 127], expected [32, 128]"),
    "gptq cut scales": ("gptq", changed("scales", lambda t: t[:, 1:]), f"{LAYER}.scales is [2, 127], expected [2, 128]"),
    "gptq 3 groups": ("gptq", changed("scales", lambda t: torch.cat([t, t[:1]])), f"{LAYER} has scales for 3 groups"),
    "gptq other dtype": ("gptq", changed("qweight", lambda t: t.float()), f"{LAYER}.qweight is float32, expected int32"),
    "gptq NaN": ("gptq", changed("scales", lambda t: t * torch.nan), f"{LAYER}.scales contains NaN or infinity"),
    "gptq bad groups": ("gptq", changed("g_idx", lambda t: t * 0), f"{LAYER}.g_idx does not give 128 inputs to each group"),
    "gptq wild groups": ("gptq", changed("g_idx", lambda t: t - 5), f"{LAYER}.g_idx does not give 128 inputs to each group"),
    "awq cut zeros": ("awq", changed("qzeros", lambda t: t[1:]), f"{LAYER}.qzeros is [3, 16], expected [4, 16]"),
    "awq scalar": ("awq", changed("scales", lambda t: t[0, 0]), f"{LAYER} has scales for 0 groups"),
    "w4a16 shape": (
        "w4a16",
        changed("weight_shape", lambda t: t + 1),
        f"{LAYER}.weight_shape says [129, 257], expected [128, 256]",
    ),
    "w4a16 width": (
        "w4a16",
        changed("weight_packed", lambda t: t[:, 1:]),
        f"{LAYER}.weight_packed has 31 words for 256 inputs",
    ),
    "w4a16 no scales": ("w4a16", missing("weight_scale"), f"the checkpoint lacks {LAYER}.weight_scale"),
    "w8a8 no scales": ("w8a8", missing("weight_scale"), f"{LAYER}.weight is int8, and the checkpoint lacks its"),
    "fp8 no scales": (
        "fp8-qwen",
        missing("weight_scale_inv"),
        f"{LAYER}.weight is float8_e4m3fn, and the checkpoint lacks its",
    ),
    "fp8 blocks": (
        "fp8-qwen",
        changed("weight_scale_inv", lambda t: t[:, :1]),
        f"{LAYER}.weight_scale_inv is [1, 1], expected [1, 2]",
    ),
    "fp8 channels": ("fp8-channel", changed("weight_scale", lambda t: t[0]), f"{LAYER}.weight_scale is [1], expected [128, 1]"),
    "fp8 infinite": (
        "fp8-qwen",
        changed("weight_scale_inv", lambda t: t / 0),
        f"{LAYER}.weight_scale_inv contains NaN or infinity",
    ),
    "fp8 NaN": ("fp8-qwen", changed("weight", lambda t: (t.float() * torch.nan).to(t.dtype)), f"{LAYER}.weight contains NaN"),
    "mxfp4 NaN": ("mxfp4", changed("weight_scale", lambda t: t | 255), f"{LAYER}.weight_scale contains NaN"),
    "nvfp4 no number": ("nvfp4", missing("weight_global_scale"), f"the checkpoint lacks {LAYER}.weight_global_scale"),
    "nvfp4 no scales": ("nvfp4", missing("weight_scale"), f"the checkpoint lacks {LAYER}.weight_scale"),
    "nvfp4 zero": ("nvfp4", changed("weight_global_scale", lambda t: t * 0), "give scales that float32 cannot hold"),
    "nvfp4 NaN": ("nvfp4", changed("weight_scale", lambda t: (t.float() * torch.nan).to(t.dtype)), "weight_scale contains NaN"),
    "nvfp4 large": (
        "nvfp4-modelopt",
        changed("weight_scale_2", lambda t: t * 0 + 1e37),
        "give scales that float32 cannot hold",
    ),
    "nvfp4 tiny": (
        "nvfp4-modelopt",
        lambda tensors: tensors.update(
            {
                f"{LAYER}.weight_scale": torch.ones(128, 16).to(torch.float8_e4m3fn),
                f"{LAYER}.weight_scale_2": torch.tensor(2.0**-149),
            }
        ),
        "give scales that float32 cannot hold",
    ),
    "nvfp4 cut": (
        "nvfp4",
        changed("weight_packed", lambda t: t[:, 1:]),
        f"{LAYER}.weight_packed is [128, 127], expected [128, 128]",
    ),
    "nvfp4 zeros": (
        "nvfp4",
        lambda tensors: tensors.update({f"{LAYER}.weight_zero_point": torch.zeros(128, 16, dtype=torch.int8)}),
        f"{LAYER}.weight_zero_point: zeros of 4-bit floats are not supported",
    ),
    "modelopt no scales": (
        "nvfp4-modelopt",
        missing("weight_scale"),
        f"{LAYER}.weight is uint8, and the checkpoint lacks its weight_scale",
    ),
    "modelopt no number": ("nvfp4-modelopt", missing("weight_scale_2"), f"the checkpoint lacks {LAYER}.weight_scale_2"),
    "modelopt inputs": (
        "nvfp4-modelopt",
        lambda tensors: tensors.update({f"{LAYER}.pre_quant_scale": torch.ones(256)}),
        f"{LAYER}.pre_quant_scale changes the layer's inputs",
    ),
    "an embedding": (
        "w8a8",
        lambda tensors: tensors.update(
            {
                "model.embed_tokens.weight": torch.ones(320, 128, dtype=torch.int8),
                "model.embed_tokens.weight_scale": torch.ones(320, 1),
            }
        ),
        "model.embed_tokens is quantised, and LlamaForCausalLM has no separate linear layer for it",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_tensor_is_named_in_one_line_and_exit_code_2(what, tmp_path, capsys):
    name, change, said = WRONG[what]
    made = written(tmp_path, name)
    broken(made, change)
    assert main(["generate", "--target", str(made.folder), "--method", "plain", "--compile", "never", "hello"]) == 2
    out = capsys.readouterr().err.strip().splitlines()
    assert out[-1].startswith("error: ") and said in out[-1], out


def test_a_truncated_file_raises_in_one_line(tmp_path):
    made = written(tmp_path, "gptq")
    file = made.folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(OutriderError, match=r"model\.safetensors is incomplete, it has") as caught:
        ModelRunner.load(made.folder, EAGER)
    assert "\n" not in str(caught.value)


REFUSED = {
    "gptq with 3 bits": {"quant_method": "gptq", "bits": 3},
    "GPTQ in the format marlin": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
    "AutoRound in the packing auto_round": {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round"},
    "AutoRound with the data type mx_fp": {
        "quant_method": "auto-round",
        "bits": 4,
        "packing_format": "auto_round:auto_gptq",
        "data_type": "mx_fp",
    },
    "AutoRound with the data type int and sym=False": {
        "quant_method": "auto-round",
        "bits": 4,
        "packing_format": "auto_round:auto_gptq",
        "sym": False,
    },
    "AWQ in the version gemv": {"quant_method": "awq", "bits": 4, "version": "gemv"},
    "compressed-tensors in the format mxfp8-quantized": {"quant_method": "compressed-tensors", "format": "mxfp8-quantized"},
    "ModelOpt with the algorithm NVFP4_AWQ": {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
    "ModelOpt with the algorithm W4A8_AWQ": {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "W4A8_AWQ"}},
    },
    "compressed-tensors with sparse weights": {
        "quant_method": "compressed-tensors",
        "sparsity_config": {"format": "sparse-24-bitmask"},
    },
    "exl3": {"quant_method": "exl3", "bits": 4.0},
    "nvfp4": {"quant_method": "nvfp4"},
    "an unnamed method": {"bits": 4},
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_formats_are_rejected_before_weights_are_read(what, tmp_path, monkeypatch):
    made = written(tmp_path, "gptq")
    config = json.loads((made.folder / "config.json").read_text())
    (made.folder / "config.json").write_text(json.dumps(config | {"quantization_config": REFUSED[what]}))
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(OutriderError) as caught:
        ModelRunner.load(made.folder, EAGER)
    said = str(caught.value)
    assert what.lower() in said.lower()
    assert "\n" not in said and said.endswith("choose a checkpoint in 16 bits, GPTQ, AWQ, compressed-tensors, ModelOpt or FP8")


@pytest.mark.parametrize("also", [{}, {"quantization_config": {"bits": 4, "group_size": 64}}])
def test_a_checkpoint_of_mlx_is_rejected_before_weights_are_read(also, tmp_path, monkeypatch):
    made = written(tmp_path, "gptq")
    config = json.loads((made.folder / "config.json").read_text())
    del config["quantization_config"]
    config |= {"quantization": {"bits": 4, "group_size": 64}, **also}
    (made.folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(
        OutriderError, match=r"is quantised by MLX, which this CPU cannot run: .*; choose a checkpoint in 16 bits"
    ):
        ModelRunner.load(made.folder, EAGER)


def beside(folder, stated):
    """Move the quantisation of a checkpoint to the file of NVIDIA's older ones."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps(stated))


def test_the_quantisation_may_be_stated_beside_the_config(tmp_path):
    made = written(tmp_path, "nvfp4-modelopt")
    layers = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    beside(made.folder, {"producer": {"name": "modelopt"}, "quantization": layers})
    stored = {key: module.read() for key, module in loaded(made.folder).named_modules() if isinstance(module, StoredLinear)}
    assert stored.keys() == made.values.keys()
    assert all(torch.equal(weight.dequantize(), made.values[key]) for key, weight in stored.items())
    for text in ('{"quantization": 4}', "[" * 100_000):
        (made.folder / "hf_quant_config.json").write_text(text)
        with pytest.raises(OutriderError, match=r"cannot read the quantisation that .*hf_quant_config\.json states"):
            loading.load_config(made.folder)


@pytest.mark.parametrize("name", ["fp8-qwen", "fp8-channel"])
def test_fp8_can_be_rounded_to_8_bits_and_is_read_once(name, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    made = written(tmp_path, name)
    config = RunnerConfig(weights="int8", compile="never")
    first = ModelRunner.load(made.folder, config)
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    again = ModelRunner.load(made.folder, config)
    text = make_text(30, 1)
    expected, got = plain_logits(made.model, text)[-1], first.extend(["a"], [text])[0]
    assert (got - expected).norm() < 0.04 * expected.norm()
    assert {blocks.bits_of(layer.packed) for layer in linear.packed_layers(first.model)} == {8}
    assert torch.equal(again.extend(["a"], [text])[0], got)


def test_integers_are_not_rounded_again(tmp_path):
    made = written(tmp_path, "gptq")
    with pytest.raises(OutriderError, match="needs a checkpoint in 16 or 32 bits or FP8, got one quantised by gptq"):
        ModelRunner.load(made.folder, RunnerConfig(weights="int8", compile="never"))


def test_experts_in_mxfp4_have_the_formats_values(tmp_path):
    """gpt-oss: blocks uint8 [experts, outputs, groups, 16], two inputs per byte; scales uint8 [experts, outputs, groups]."""
    made = write_experts(tmp_path / "experts")
    runner = ModelRunner.load(made.folder, EAGER)
    for name, values in made.values.items():
        layer, _, part = name.rpartition(".")
        packed = getattr(runner.model.get_submodule(layer), "up" if part == "gate_up_proj" else "down").packed
        values = values.transpose(1, 2)
        if part == "gate_up_proj":  # rows of gate and up projection alternate
            values = torch.cat([values[:, ::2], values[:, 1::2]], 1)
        assert blocks.form_of(packed).codes == "float4"
        assert torch.equal(blocks.unpack(packed, *values.flatten(0, 1).shape), values.flatten(0, 1))
    text = make_text(30, 1)
    expected, got = plain_logits(made.model, text)[-1], runner.extend(["a"], [text])[0]
    assert (got - expected).norm() < 0.04 * expected.norm()


@pytest.mark.parametrize("exponent", [253, 255])
def test_experts_of_gpt_oss_with_scales_beyond_float32_are_refused(exponent, tmp_path):
    """The largest codes became infinite."""
    folder = write_experts(tmp_path / "experts").folder
    tensors = load_file(folder / "model.safetensors")
    name = next(each for each in tensors if each.endswith("down_proj_scales"))
    tensors[name][0, 0, 0] = exponent
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(OutriderError, match=f"{name} contains NaN or exponents beyond float32"):
        ModelRunner.load(folder, EAGER)


def logits(folder, text=None):
    runner = ModelRunner.load(folder, EAGER)
    return runner.extend(["a"], [text or make_text(30, 1)])[0]


def test_layers_may_be_spread_over_files(tmp_path):
    made = written(tmp_path, "gptq-by-activation")
    expected = logits(made.folder)
    tensors = load_file(made.folder / "model.safetensors")
    (made.folder / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {"metadata": {}, "weight_map": {}}
    for number in range(3):  # the tensors of a layer are in different files
        part = {name: tensors[name] for name in names[number::3]}
        file = f"model-{number + 1:05}-of-00003.safetensors"
        save_file(part, made.folder / file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(part, file)
    (made.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(made.folder), expected)


def test_names_may_lack_the_models_prefix(tmp_path):
    made = written(tmp_path, "awq")
    expected = logits(made.folder)
    broken(made, lambda tensors: [tensors.update({name.removeprefix("model."): tensors.pop(name)}) for name in list(tensors)])
    assert torch.equal(logits(made.folder), expected)


def test_a_quantised_head(tmp_path):
    made = written(tmp_path, "gptq", keep=())
    expected = plain_logits(made.model, make_text(30, 1))[-1]
    assert (logits(made.folder) - expected).norm() < 0.04 * expected.norm()
    tied = written(tmp_path / "tied", "gptq", keep=(), tie_word_embeddings=True)
    with pytest.raises(OutriderError, match="lm_head is quantised, and the config ties it to the embedding"):
        ModelRunner.load(tied.folder, EAGER)


def test_a_bias_in_the_files_is_used(tmp_path):
    made = written(tmp_path, "gptq")
    expected = logits(made.folder)
    broken(made, lambda tensors: tensors.update({f"{LAYER}.bias": torch.zeros(128, dtype=torch.float16)}))
    assert torch.equal(logits(made.folder), expected)
    broken(made, lambda tensors: tensors.update({f"{LAYER}.bias": torch.ones(128, dtype=torch.float16)}))
    assert not torch.equal(logits(made.folder), expected)
    broken(made, lambda tensors: tensors.update({f"{LAYER}.bias": torch.ones(127, dtype=torch.float16)}))
    with pytest.raises(OutriderError, match=rf"{LAYER}.bias is \[127\], expected \[128\]"):
        ModelRunner.load(made.folder, EAGER)


def test_layers_that_are_not_quantised_stay_so(tmp_path):
    made = written(tmp_path, "w4a16", keep=("lm_head", "layers.0.mlp"))
    model = loaded(made.folder)
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert type(model.model.layers[1].mlp.up_proj) is StoredLinear
    expected = plain_logits(made.model, make_text(30, 1))[-1]
    assert (logits(made.folder) - expected).norm() < 0.04 * expected.norm()


@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round:gptq:exllamav2"])
def test_autoround_packs_as_gptq(packing, tmp_path):
    made = written(tmp_path, "gptq")
    expected, config = logits(made.folder), json.loads((made.folder / "config.json").read_text())
    named = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
    (made.folder / "config.json").write_text(json.dumps(config | {"quantization_config": named | {"packing_format": packing}}))
    assert torch.equal(logits(made.folder), expected)


def test_a_g_idx_in_natural_order_is_accepted(tmp_path):
    made = written(tmp_path, "w4a16")
    expected = logits(made.folder)
    broken(made, lambda tensors: tensors.update({f"{LAYER}.weight_g_idx": torch.full((256,), -1, dtype=torch.int32)}))
    assert torch.equal(logits(made.folder), expected)


def test_groups_without_a_block_form_are_rejected(tmp_path):
    quantization, write_layer = gptq(group=40)
    made = write(tmp_path / "model", quantization, write_layer, hidden_size=160)
    with pytest.raises(OutriderError, match=r"model\.layers\.\S+: unsupported group of 40 inputs"):
        ModelRunner.load(made.folder, EAGER)


def test_low_bit_drafts_need_fewer_bits_than_the_checkpoint(tmp_path):
    with pytest.raises(OutriderError, match="invalid bits 4: expected fewer than the target's weights have"):
        LLM(written(tmp_path, "gptq").folder, method="low-bit:bits=4", compile="never")
    folder = written(tmp_path, "gptq-8-asym").folder
    llm = LLM(folder, method="low-bit:bits=4", num_draft_tokens=4, compile="never")
    assert tokens_of(llm) == tokens_of(LLM(folder, method="plain", compile="never"))
    assert llm.stats.num_drafts > 0 and llm.stats.faults == 0


@pytest.mark.parametrize("name", ["gptq-by-activation", "w4a16-asym"])
def test_sampled_output_equals_plain_decoding_with_same_text(name, tmp_path):
    folder = written(tmp_path, name).folder
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=3)
    plain = LLM(folder, method="plain", compile="never", same_text=True)
    llm = LLM(folder, method="ngram", num_draft_tokens=4, compile="never", same_text=True)
    assert tokens_of(llm, params) == tokens_of(plain, params)


def test_on_a_gpu_the_advice_is_the_cpu_where_that_reads_the_format():
    with pytest.raises(OutriderError, match=r"which cuda cannot run: .*; choose a checkpoint in 16 bits, or device=cpu$"):
        formats.choose("x", {"quant_method": "gptq", "bits": 4}, torch.device("cuda"))
    with pytest.raises(OutriderError, match=r"which cuda cannot run: .*; choose a checkpoint in 16 bits, GPTQ"):
        formats.choose("x", {"quant_method": "other"}, torch.device("cuda"))


@pytest.mark.parametrize("has_gpu", [True, False])
def test_quantisers_of_transformers_get_a_cpu_as_the_device_only_if_there_is_a_gpu(has_gpu, monkeypatch):
    """Some refuse any map with a CPU: then before the download."""
    found, quantization = [], {"quant_method": "other"}
    monkeypatch.setattr(formats, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    quantiser = SimpleNamespace(validate_environment=lambda device_map, weights_only: found.append(device_map))
    monkeypatch.setattr(formats.AutoHfQuantizer, "from_config", lambda *args, **options: quantiser)
    assert formats.choose("x", quantization, CPU) is None
    assert formats.loader_options(None, quantization, CPU) == ({"device_map": {"": "cpu"}} if has_gpu else {})
    assert found == [{"": "cpu"} if has_gpu else None]
