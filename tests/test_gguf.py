"""GGUF files: values equal the gguf package's, output does not depend on drafts, and one-line errors for broken files."""

from __future__ import annotations

import itertools
import logging
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

gguf = pytest.importorskip("gguf")

import gguf_configs  # noqa: E402
import gguf_files  # noqa: E402 - needs the package
import numpy as np  # noqa: E402
from gguf import GGMLQuantizationType as Kind  # noqa: E402
from runner.rounds import make_text, plain_logits  # noqa: E402
from tiny_folder import make_tokenizer  # noqa: E402
from tiny_hybrids import noisy  # noqa: E402
from torch import nn  # noqa: E402
from toy import outputs_of  # noqa: E402
from transformers import Gemma3Config, GenerationConfig  # noqa: E402

from outrider import LLM, SamplingParams, memory, native, weight_files  # noqa: E402
from outrider.engine.config import eos_token_ids, load_tokenizer  # noqa: E402
from outrider.runner import ModelRunner, RunnerConfig, blocks, linear, tokenizers  # noqa: E402
from outrider.runner import gguf as gguf_reader  # noqa: E402
from outrider.runner.gguf import architectures, codes  # noqa: E402
from outrider.types import OutriderError  # noqa: E402

needs_kernels = pytest.mark.skipif(not native.load(), reason="no C++ compiler")
KINDS = {"mixed": gguf_files.mixed} | {kind.name: lambda _, kind=kind: kind for kind in (Kind.Q8_0, Kind.Q4_0, Kind.F16)}
KINDS["MXFP4"] = lambda name: Kind.MXFP4 if "_exps" in name else Kind.Q8_0  # as in gpt-oss's files
ARCHITECTURES = tuple(gguf_configs.CONFIGS)
TIED = tuple(name for name in ARCHITECTURES if not name.startswith(("nemotron_h", "falcon")))
UNTIED = tuple(  # may have an output head
    name for name in ARCHITECTURES if not name.startswith(("gemma", "lfm2moe", "command-r", "cohere2"))
)
SEVERAL_KINDS = ("llama", "gemma3n", "qwen3next", "gpt-oss", "deepseek2", "lfm2", "nemotron_h_moe", "falcon-h1")


def load(path, **options):
    return ModelRunner.load(path, RunnerConfig(compile="never", **options))


@pytest.mark.parametrize("name", codes.FORMATS)
def test_every_format_has_the_values_of_the_library(name):
    kind, rng = Kind[name], np.random.default_rng(0)
    if kind is Kind.IQ1_M:
        data = few_bits_without_a_place_for_the_scale((70, 512), rng)
    elif kind is Kind.NVFP4:
        data = rng.integers(0, 256, (70, 288), dtype=np.uint8)  # all scales, with signs and NaN, which ggml ignores
    elif kind in gguf_files.SCALES:
        data = gguf_files.random_codes((70, 512), kind, rng)
        for at in gguf_files.SCALES[kind]:  # scales of both signs, and 0
            data[:3, at : at + 2] = np.float16(-3e-3).reshape(1).view(np.uint8)
            data[3, at : at + 2] = 0
    else:
        data = gguf.quants.quantize(rng.standard_normal((70, 512)).astype(np.float32), kind)
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    packed = codes.pack(torch.from_numpy(data), name)
    assert torch.equal(blocks.unpack(packed, 70, 512), expected)
    assert 8 * (packed[0].nbytes - blocks.HEADER) / (32 * 512) == codes.FORMATS[name].memory
    assert torch.equal(torch.ops.outrider.embed(torch.arange(70), packed, 512), expected)
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0))
    for bits, error in ((32, 1e-5), (blocks.activation_bits(), 0.02)):
        found = torch.ops.outrider.linear(x, packed, None, 70, bits)
        assert (found - x @ expected.T).norm() <= error * (x @ expected.T).norm()


def few_bits_without_a_place_for_the_scale(shape, rng):
    """Return bytes of IQ1_M, whose float16 scale is in the high halves of four bytes, with random codes."""
    raw = rng.integers(0, 256, (shape[0], shape[1] // 256, 56), dtype=np.uint8)
    scales = raw[..., 48:].copy().view(np.uint16)
    halves = rng.uniform(-3e-3, 3e-3, scales.shape[:2]).astype(np.float16).view(np.uint16)
    scales = scales & 0x0FFF | (halves[..., None] >> np.array([0, 4, 8, 12], np.uint16) & 15) << 12
    raw[..., 48:] = scales.astype(np.uint16).view(np.uint8)
    return raw.reshape(shape[0], -1)


@needs_kernels
def test_a_file_whose_few_bits_take_more_in_memory_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    gguf_files.write(path, gguf_files.make_model("llama"), lambda _: Kind.IQ2_S)
    file, size = gguf_reader.GgufFile.open(path), path.stat().st_size
    weights = sum(int(np.prod(tensor.shape)) for tensor in file.tensors.values() if tensor.tensor_type is Kind.IQ2_S)
    assert 1.3 * size < file.num_bytes(None) and 4.5 * weights / 8 < file.num_bytes(None) < 4.7 * weights / 8
    monkeypatch.setattr(memory, "total_memory", lambda: size + 1000)
    with pytest.raises(OutriderError, match=r"the weights in .* take .* MB, but this process has .* choose a smaller model"):
        load(path)


@pytest.mark.parametrize("dtype, num_bytes", [("bfloat16", 2), ("float32", 4)])
def test_the_memory_of_converted_weights_is_checked_before_they_are_read(dtype, num_bytes, tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    gguf_files.write(path, gguf_files.make_model("llama"), lambda _: Kind.Q4_0)
    needed = num_bytes * sum(int(np.prod(tensor.shape)) for tensor in gguf_reader.GgufFile.open(path).tensors.values())
    assert path.stat().st_size < needed
    monkeypatch.setattr(memory, "total_memory", lambda: needed - 1)
    monkeypatch.setattr("outrider.runner.gguf.weights.join_parts", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(OutriderError, match=r"the weights in .* take .* MB, but this process has .* choose a smaller model"):
        load(path, dtype=dtype)


def test_factors_multiply_the_scales_of_nvfp4():
    """In float32, before the codes: so do ModelOpt and compressed-tensors."""
    rng = np.random.default_rng(0)
    data, factors = gguf_files.random_codes((70, 512), Kind.NVFP4, rng), rng.uniform(1e-5, 1e-4, 70).astype(np.float32)
    raw = data.reshape(70, 8, 36)
    scales = gguf.quants.NVFP4.ue4m3_to_fp32(raw[..., :4]).astype(np.float32) * factors[:, None, None]
    pairs = raw[..., 4:].reshape(70, 8, 4, 8)
    numbers = np.array(gguf.quants.NVFP4.kvalues, np.float32)[np.concatenate([pairs & 15, pairs >> 4], -1)]
    expected = torch.from_numpy((numbers * scales[..., None]).reshape(70, 512))
    packed = codes.pack(torch.from_numpy(data), "NVFP4", torch.from_numpy(factors))
    assert torch.equal(blocks.unpack(packed, 70, 512), expected)
    assert 8 * (packed[0].nbytes - blocks.HEADER) / (32 * 512) == 6.0


def in_nvfp4(name):
    """Return the type of a tensor as in files of NVFP4."""
    return Kind.Q8_0 if "embd" in name or name == "output.weight" else Kind.NVFP4


def add_factors(writer, model, rng):
    """Add factors of weights and inputs to each tensor in NVFP4, as llama.cpp's converter does. Returns those of weights."""
    factors = {}
    for layer in range(model.config.num_hidden_layers):
        parts = ["attn_q", "attn_k", "attn_v", "attn_output"]
        experts = getattr(model.config, "num_experts", 1)
        parts += [f"ffn_{part}{'_exps' if experts > 1 else ''}" for part in ("gate", "up", "down")]
        for part in parts:
            count = experts if "_exps" in part else 1
            factors[f"blk.{layer}.{part}"] = rng.uniform(0.2, 2, count).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.{part}.scale", factors[f"blk.{layer}.{part}"])
            writer.add_tensor(f"blk.{layer}.{part}.input_scale", np.full(count, 3e-3, np.float32))
    return factors


@needs_kernels
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3moe"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_file_in_nvfp4_has_factors(architecture, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "activation_bits", lambda: 32)
    monkeypatch.setattr(linear.kernels, "has_fast_bfloat16", lambda: False)
    path, model, factors = tmp_path / "model.gguf", gguf_files.make_model(architecture), {}

    def change(writer):
        factors.update(add_factors(writer, model, np.random.default_rng(0)))

    exact = gguf_files.write(path, model, in_nvfp4, change)
    for number, layer in enumerate(exact.model.layers):
        by_part = {name.rpartition(".")[2]: torch.from_numpy(each) for name, each in factors.items() if f".{number}." in name}
        for part, module in {"q": "q_proj", "k": "k_proj", "v": "v_proj", "output": "o_proj"}.items():
            getattr(layer.self_attn, module).weight.data *= by_part[f"attn_{part}"]
        if architecture == "qwen3moe":
            gates, ups = layer.mlp.experts.gate_up_proj.data.chunk(2, 1)
            gates *= by_part["ffn_gate_exps"][:, None, None]
            ups *= by_part["ffn_up_exps"][:, None, None]
            layer.mlp.experts.down_proj.data *= by_part["ffn_down_exps"][:, None, None]
        else:
            for part in ("gate", "up", "down"):
                getattr(layer.mlp, f"{part}_proj").weight.data *= by_part[f"ffn_{part}"]
    text = make_text(30, 1)
    runner, expected = load(path, dtype=dtype), plain_logits(exact, text)[-1]
    got = runner.extend(["a"], [text])[0]
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4 * float(expected.abs().max()))
    if dtype == "auto":
        held = sum(layer.packed.nbytes for layer in linear.packed_layers(runner.model))
        stated = gguf_reader.GgufFile.open(path).num_bytes(None)
        assert 0.8 * stated < held < 1.3 * stated  # without the embedding, with headers of panels


@pytest.mark.parametrize(
    "factors", [np.ones(2, np.float32), np.ones(1, np.float16), np.full(1, np.nan, np.float32)], ids=["2", "float16", "NaN"]
)
def test_wrong_factors_of_nvfp4_are_named(factors, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_files.write(
        path, gguf_files.make_model("llama"), in_nvfp4, lambda writer: writer.add_tensor("blk.0.ffn_up.scale", factors)
    )
    with pytest.raises(OutriderError, match=r"tensor blk\.0\.ffn_up\.scale is not 1 float32 numbers"):
        load(path)


@needs_kernels
def test_a_file_of_few_bits_runs_with_its_values(tmp_path):
    """As llama-quantize mixes them in IQ3_M and similar files."""
    kinds = {
        "attn_v": Kind.IQ4_XS,
        "attn_output": Kind.IQ4_NL,
        "ffn_down": Kind.IQ3_S,
        "ffn_up": Kind.IQ2_S,
        "attn_q": Kind.IQ2_XXS,
    }

    def kind_of(name):
        return next((kind for part, kind in kinds.items() if part in name), Kind.Q6_K if "embd" in name else Kind.IQ3_XXS)

    exact = gguf_files.write(tmp_path / "model.gguf", gguf_files.make_model("llama"), kind_of)
    runner, text = load(tmp_path / "model.gguf"), make_text(30, 1)
    found, expected = runner.extend(["a"], [text])[0], plain_logits(exact, text)[-1]
    assert (found - expected).norm() < 0.06 * expected.norm()  # activations have 8 bits on some CPUs
    texts = [
        LLM(tmp_path / "model.gguf", method=method, compile="never").generate([text], SamplingParams(max_tokens=20))
        for method in ("plain", "ngram")
    ]
    assert outputs_of(texts[0])[0].token_ids == outputs_of(texts[1])[0].token_ids


def own_weights(model, name):
    """Return a layer's weight, which may be part of a fused one, in float32."""
    module = model.get_submodule(name)
    if not isinstance(module, linear.FusedSlice):
        return linear.weight_of(module).float()
    group = module._group[0]
    return linear.weight_of(group).float().split(group.sizes)[module.index]


def experts_in_file_layout(module):
    """Return [experts * 2 N, inputs] and [experts * inputs, N] of a layer's experts; None for other modules."""
    if not isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
        return None
    up, down = module.gate_up_proj, module.down_proj
    if module.is_transposed:  # gpt-oss alternates rows of gate and up projection
        up, down = up.transpose(1, 2), down.transpose(1, 2)
        up = torch.cat([up[:, ::2], up[:, 1::2]], 1)
    return up.flatten(0, 1), down.flatten(0, 1)


@needs_kernels
@pytest.mark.parametrize(
    "architecture, tied, kinds",
    [
        (name, tied, kinds)
        for tied, names in ((True, TIED), (False, UNTIED))
        for name in names
        for kinds in (KINDS if name in SEVERAL_KINDS else ("mixed", "F16"))  # packed, and as values
    ],
)
def test_a_loaded_model_has_the_values_of_the_file(architecture, tied, kinds, tmp_path):
    model = gguf_files.make_model(architecture, tie_word_embeddings=tied)
    exact = gguf_files.write(tmp_path / "model.gguf", model, KINDS[kinds])
    own = load(tmp_path / "model.gguf").model
    for name, module in exact.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            assert torch.equal(own_weights(own, name), module.weight), name
        elif getattr(module, "weight", None) is not None:
            assert torch.equal(own.get_submodule(name).weight, module.weight), name
        elif (experts := experts_in_file_layout(module)) is not None:
            packed = own.get_submodule(name)
            for layer, weight in zip((packed.up, packed.down), experts, strict=True):
                assert torch.equal(linear.weight_of(layer).float(), weight), name
        if isinstance(getattr(module, "bias", None), torch.Tensor) and not name.endswith(("q_proj", "k_proj", "v_proj")):
            assert torch.equal(own.get_submodule(name).bias, module.bias), name
    if kinds != "F16":
        assert not any(type(module) in (nn.Linear, nn.Embedding) for module in own.modules())  # a router may be of a subclass
        size = sum(
            module.packed.nbytes
            for name, module in own.named_modules()
            if isinstance(module, linear.PackedLinear) and not name.endswith("kv_b_proj")  # which is float32
        )
        assert size < (tmp_path / "model.gguf").stat().st_size * 1.6


@needs_kernels
@pytest.mark.parametrize("kinds", ["mixed", "Q4_0"])
@pytest.mark.parametrize(
    "architecture, precision",
    # Without 8: a random recurrent state amplifies rounded activations, and a router chooses other experts.
    [
        (name, bits)
        for name in ARCHITECTURES
        for bits in (
            [32] if name.startswith(("qwen3next", "qwen35", "gemma4 with", "afmoe", "phimoe", "exaone-moe")) else [8, 32]
        )
    ],
)
def test_logits_equal_those_of_the_dequantised_model(architecture, kinds, precision, tmp_path, monkeypatch):
    if precision == 32:
        monkeypatch.setattr(blocks, "activation_bits", lambda: 32)
        monkeypatch.setattr(linear.kernels, "has_fast_bfloat16", lambda: False)  # attention and its cache in float32
    elif blocks.activation_bits() != 8:
        pytest.skip("no AVX-512 VNNI")
    exact = gguf_files.write(tmp_path / "model.gguf", gguf_files.make_model(architecture), KINDS[kinds])
    text = make_text(30, 1)
    expected = plain_logits(exact, text)[-1]
    got = load(tmp_path / "model.gguf").extend(["a"], [text])[0]
    if precision == 32:
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4 * float(expected.abs().max()))
    else:
        # Attention of Gemma 3n and 4 has no scale, so that rounded activations change a random model's scores more.
        assert (got - expected).norm() < (0.2 if architecture.startswith(("gemma3n", "gemma4")) else 0.05) * expected.norm()


def test_the_documentation_names_every_architecture():
    text = (Path(__file__).parent.parent / "docs/methods.md").read_text().partition("## GGUF files")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([a-z0-9_-]+)`", text)) >= architectures.ARCHITECTURES.keys()


PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
PROMPTS = [[7, 3, 9], [(5 * i * i + i) % 60 + 1 for i in range(45)], [(3 * i) % 11 + 1 for i in range(30)], [8]]
PROMPTS += [[(11 * i + 5) % 97 + 2 for i in range(20)], [60, 2, 31, 44, 90]]


def tokens_of(llm, params=PARAMS):
    return [completion.token_ids for completion in outputs_of(llm.generate(PROMPTS, params))]


@needs_kernels
@pytest.mark.parametrize(
    "architecture, kinds",
    [
        ("llama", "mixed"),
        ("qwen3", "Q8_0"),
        ("phi3", "mixed"),
        ("gemma4", "mixed"),
        ("gemma4 with experts", "Q8_0"),
        ("qwen3moe", "mixed"),
        ("deepseek2", "mixed"),
        ("granitehybrid", "mixed"),
        ("lfm2moe", "Q8_0"),
    ],
)
def test_drafts_do_not_change_the_output(architecture, kinds, tmp_path):
    model = gguf_files.make_model(architecture, seed=1)
    gguf_files.write(tmp_path / "model.gguf", model, KINDS[kinds])
    gguf_files.write(tmp_path / "draft.gguf", noisy(model), KINDS["Q4_0"])
    target, options = tmp_path / "model.gguf", {"compile": "never"}
    expected = tokens_of(LLM(target, method="plain", max_batch=1, **options))
    assert len({token for tokens in expected for token in tokens}) > 10
    for k, batch in itertools.product((1, 4, 8), (1, 4)):
        llm = LLM(target, draft=str(tmp_path / "draft.gguf"), num_draft_tokens=k, max_batch=batch, **options)
        assert tokens_of(llm) == expected, (k, batch)
        assert llm.stats.faults == 0 and llm.stats.num_drafts > 0
    methods = ["ngram"]
    if not architecture.startswith("gemma4"):  # its last layers read other layers' keys: no exit is possible
        methods.append("early-exit:layers=1")
    if kinds == "Q8_0":
        methods.append("low-bit:bits=4")
    for method in methods:
        llm = LLM(target, method=method, num_draft_tokens=4, max_batch=4, **options)
        assert tokens_of(llm) == expected, method
        assert llm.stats.faults == 0 and llm.stats.num_drafts > 0


@needs_kernels
def test_a_compiled_pass_equals_an_eager_one(tmp_path):
    gguf_files.write(tmp_path / "model.gguf", gguf_files.make_model("qwen3"), gguf_files.mixed)
    options = {"method": "ngram", "num_draft_tokens": 3}
    eager = tokens_of(LLM(tmp_path / "model.gguf", compile="never", **options))
    assert tokens_of(LLM(tmp_path / "model.gguf", compile="always", **options)) == eager


def test_tokenizer_and_chat_template_come_from_the_file(tmp_path):
    gguf_files.write(tmp_path / "model.gguf", gguf_files.make_model("llama"), KINDS["Q8_0"], lambda w: w.add_eot_token_id(7))
    llm, original = LLM(str(tmp_path / "model.gguf"), method="plain", compile="never"), make_tokenizer()
    for text in ("def add(first, second):\n    return 12", "naïve café <|end|> x", "  two"):
        assert llm.encode(text) == original.encode(text)
        assert llm.tokenizer.decode(llm.encode(text)) == text
    messages = [{"role": "user", "content": "hello"}]
    template = original.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert llm.chat_prompt(messages) == original.encode(template)
    assert llm.runner.model.config.eos_token_id == [0, 7]


@pytest.mark.parametrize(("rule", "is_known"), [("gpt-2", True), ("llama-bpe", True), ("smollm", True), ("odd", False)])
def test_a_rule_of_splitting_that_transformers_does_not_know_is_named(rule, is_known, tmp_path, caplog):
    path = tmp_path / "model.gguf"

    def rename(writer):
        writer.kv_data[0]["tokenizer.ggml.pre"].value = rule

    gguf_files.write(path, gguf_files.make_model("llama"), KINDS["Q8_0"], rename)
    assert load_tokenizer(path) is not None
    said = [record.getMessage() for record in caplog.records if "splits text" in record.getMessage()]
    assert (
        said == []
        if is_known
        else "by the rule 'odd'" in said[0] and "the original model's tokenizer" in said[0] and len(said) == 1
    )


def test_loading_reads_no_list_of_strings_one_by_one(tmp_path, monkeypatch):
    """gguf's reader takes 7 s for a vocabulary of 150,000; transformers uses it for the config and for AutoTokenizer."""
    path, read, calls = tmp_path / "model.gguf", gguf.GGUFReader._get_str, []
    gguf_files.write(
        path, gguf_files.make_model("llama"), KINDS["Q8_0"], lambda w: w.add_array("tokenizer.odd", ["word"] * 10_000)
    )
    monkeypatch.setattr(gguf.GGUFReader, "_get_str", lambda *args: calls.append(0) or read(*args))
    llm = LLM(path, method="plain", compile="never")
    assert llm.runner.vocab_size == 320 and llm.encode("def") == make_tokenizer().encode("def")
    assert 0 < len(calls) < 1000


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists mapped files")
def test_loading_parses_the_header_once_and_closes_the_file(tmp_path, monkeypatch):
    path, start, opened = tmp_path / "model.gguf", gguf.GGUFReader.__init__, []
    gguf_files.write(path, gguf_files.make_model("llama"), KINDS["Q8_0"])
    monkeypatch.setattr(gguf.GGUFReader, "__init__", lambda *args: opened.append(args[1]) or start(*args))
    llm = LLM(path, method="plain", compile="never")
    assert opened == [path] and llm.runner.vocab_size == 320
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_folder_with_a_config_and_a_tokenizer(tmp_path):
    """The folder's config is used, also if the file has fewer entries."""
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 64}
    model = gguf_files.make_model("llama", rope_parameters=scaled)
    exact = gguf_files.write(
        tmp_path / "some.gguf", model, KINDS["F16"], lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    )
    with pytest.raises(OutriderError, match=r"rope scaling longrope is not supported: put the model's config.json into"):
        load(tmp_path / "some.gguf")
    model.config.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    llm, text = LLM(tmp_path, method="plain", dtype="float32", compile="never"), make_text(30, 1)
    expected = plain_logits(exact, text)[-1]
    torch.testing.assert_close(llm.runner.extend(["a"], [text])[0], expected, rtol=1e-3, atol=1e-3)
    assert llm.encode("def add") == make_tokenizer().encode("def add")
    GenerationConfig(eos_token_id=[0, 9]).save_pretrained(tmp_path)
    assert eos_token_ids(load(tmp_path), None) == {0, 9}
    shutil.copy(tmp_path / "some.gguf", tmp_path / "other.gguf")
    with pytest.raises(OutriderError, match=r"holds 2 models in GGUF files: name one of them, such as .*other\.gguf"):
        load(tmp_path)


def test_rotary_factors_of_llama_3(tmp_path):
    """A tensor of factors replaces the scaling of positions, which the file's entries do not describe."""
    scaled = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = gguf_files.make_model("llama", rope_parameters=scaled | {"original_max_position_embeddings": 64})
    usual = gguf_files.make_model("llama").model.rotary_emb.inv_freq
    factors = (usual / model.model.rotary_emb.inv_freq).numpy()
    assert factors.max() > 7.9 and factors.min() < 1.1

    exact = gguf_files.write(
        tmp_path / "model.gguf", model, KINDS["F16"], lambda w: w.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    )
    text = make_text(60, 1)
    got = load(tmp_path / "model.gguf", dtype="float32").extend(["a"], [text])[0]
    torch.testing.assert_close(got, plain_logits(exact, text)[-1], rtol=1e-3, atol=1e-3)


LONG = {"rope_type": "longrope", "rope_theta": 2e4, "original_max_position_embeddings": 64}
SMALL = {"rope_type": "default", "rope_theta": 2e4, "llama_4_scaling_beta": 0.0, "original_max_position_embeddings": 256}
OTHER_CONFIGS = {
    "qwen3, YaRN": ("qwen3", {"rope_parameters": gguf_configs.YARN}),
    "mistral3 of Mistral Small": ("mistral3", {"rope_parameters": SMALL}),
    "gpt-oss without YaRN": ("gpt-oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}}),
    "gemma3 without windows": ("gemma3", {"layer_types": ["full_attention"] * 6}),
    "gemma3, linear": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "gemma4 with keys as values": (
        "gemma4",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
        | {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 20.0},
    ),
    "exaone4 without windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "granite 4 without experts": ("granitehybrid", {"num_local_experts": 0, "num_experts_per_tok": 0}),
    "deepseek2 with softmax, YaRN": (
        "deepseek2 with softmax",
        {"rope_parameters": gguf_configs.YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "glm4moe without norms of queries": ("glm4moe", {"use_qk_norm": False, "attention_bias": False}),
    "deepseek2 with groups and without YaRN": ("deepseek2", {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}),
    "command-r with norms of queries, and biases": ("command-r", {"use_qk_norm": True, "attention_bias": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with biases of attention": ("llama", {"attention_bias": True}),
    "granite with biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "hunyuan-dense with biases": ("hunyuan-dense", {"attention_bias": True}),
    "qwen2moe without biases": ("qwen2moe", {"qkv_bias": False}),
    "cohere2 with other windows": (
        "cohere2",
        {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]},
    ),
    "afmoe with other windows": ("afmoe", {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]}),
    "afmoe, one group of experts": ("afmoe", {"n_group": 1, "topk_group": 1}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": False}),
    "phimoe with a window, without biases": ("phimoe", {"sliding_window": 8, "attention_bias": False, "lm_head_bias": False}),
    "jais2 without biases": ("jais2", {"attention_bias": False, "mlp_bias": False}),
    "exaone-moe with groups": ("exaone-moe", {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 2}),
    "apertus with biases, linear": (
        "apertus",
        {"attention_bias": True, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
    ),
    "starcoder2 without biases": ("starcoder2", {"use_bias": False}),
    "falcon-h1 without norms of Mamba": ("falcon-h1", {"mamba_rms_norm": False, "mamba_n_groups": 1}),
    "gemma3, capped logits": ("gemma3", {"final_logit_softcapping": 15.0}),
    "phi3 without a window": ("phi3", {"sliding_window": None, "partial_rotary_factor": 1.0}),
    "phi3, longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": LONG
            | {"short_factor": [1.0 + i / 8 for i in range(24)], "long_factor": [2.0 + i for i in range(24)]},
        },
    ),
}


@pytest.mark.parametrize("name", OTHER_CONFIGS)
def test_entries_beyond_an_architecture_s_usual_ones(name, tmp_path):
    architecture, options = OTHER_CONFIGS[name]
    model = gguf_files.make_model(architecture, **options)
    rotary = model.config.rope_parameters

    def add_factors(writer):
        if rotary.get("rope_type") == "longrope":
            writer.add_rope_scaling_orig_ctx_len(64)
            writer.add_rope_scaling_attn_factors(model.model.rotary_emb.attention_scaling)
            for kind in ("short", "long"):
                writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rotary[f"{kind}_factor"], np.float32))

    exact = gguf_files.write(tmp_path / "model.gguf", model, KINDS["F16"], add_factors)
    runner = load(tmp_path / "model.gguf", dtype="float32", max_len=128)
    for length in (30, 100):  # within and beyond the original window of longrope
        text = make_text(length, 1)
        expected = plain_logits(exact, text)[-1]
        tolerance = 1e-3 * float(expected.abs().max())
        torch.testing.assert_close(runner.extend([str(length)], [text])[0], expected, rtol=1e-3, atol=tolerance)


def test_the_config_of_a_multimodal_model_beside_a_file(tmp_path):
    model, text = gguf_files.make_model("gemma3"), make_text(30, 1)
    exact = gguf_files.write(tmp_path / "model.gguf", model, KINDS["F16"])
    Gemma3Config(text_config=model.config.to_dict(), eos_token_id=[0, 9]).save_pretrained(tmp_path)
    runner = load(tmp_path, dtype="float32")
    torch.testing.assert_close(runner.extend(["a"], [text])[0], plain_logits(exact, text)[-1], rtol=1e-3, atol=1e-3)
    assert runner.model.config.eos_token_id == [0, 9]


@pytest.mark.parametrize("architecture, dtype", [("deepseek2", "bfloat16"), ("glm4moe", "float16")])
def test_the_bias_of_a_router_stays_in_float32_as_in_transformers(architecture, dtype, tmp_path):
    model = gguf_files.make_model(architecture)
    for name, value in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            value.normal_()
    exact = gguf_files.write(tmp_path / "model.gguf", model, KINDS["Q8_0"])
    own = load(tmp_path / "model.gguf", dtype=dtype).model.state_dict()
    biases = {name: value for name, value in exact.state_dict().items() if name.endswith("e_score_correction_bias")}
    assert biases
    for name, expected in biases.items():
        assert own[name].dtype == torch.float32 and torch.equal(own[name], expected)


def test_phimoe_s_factors_of_long_contexts_need_the_config(tmp_path):
    """Files lack the factors of its rotary positions' magnitude, which llama.cpp computes in another way."""
    positions = {"rope_type": "longrope", "rope_theta": 2e4, "original_max_position_embeddings": 64}
    positions |= {"short_factor": [1.5] * 32, "long_factor": [3.0] * 32, "short_mscale": 1.25, "long_mscale": 1.25}
    model = gguf_files.make_model("phimoe", rope_parameters=positions)

    def add_factors(writer):
        for kind in ("short", "long"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(positions[f"{kind}_factor"], np.float32))

    exact = gguf_files.write(tmp_path / "model.gguf", model, KINDS["F16"], add_factors)
    with pytest.raises(OutriderError, match=r"lacks short_mscale and long_mscale .*: put the model's config\.json into"):
        load(tmp_path / "model.gguf")
    model.config.save_pretrained(tmp_path)
    runner, text = load(tmp_path, dtype="float32", max_len=64), make_text(40, 1)
    expected = plain_logits(exact, text)[-1]
    torch.testing.assert_close(runner.extend(["a"], [text])[0], expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_the_activation_of_apertus_is_in_the_header(tmp_path):
    model = gguf_files.make_model("apertus")
    gguf_files.write(tmp_path / "model.gguf", model, KINDS["Q8_0"])
    own = load(tmp_path / "model.gguf").model
    for layer, expected in zip(own.model.layers, model.model.layers, strict=True):
        for name, number in expected.mlp.act_fn.state_dict().items():
            assert float(getattr(layer.mlp.act_fn, name)) == float(number)
    few = tmp_path / "few.gguf"
    gguf_files.write(few, model, KINDS["Q8_0"], lambda writer: writer.add_block_count(3))
    with pytest.raises(OutriderError, match=r"says xielu\.alpha_n for 2 layers, expected 3"):
        load(few)


def test_a_number_of_layers_is_checked_before_tensors_are_made_for_each(tmp_path):
    path = tmp_path / "model.gguf"

    def change(writer):
        writer.add_block_count(2**32 - 1)
        for part in ("alpha_n", "alpha_p", "beta", "eps"):
            writer.kv_data[0].pop(f"xielu.{part}", None)
            getattr(writer, f"add_xielu_{part}")([0.5])

    gguf_files.write(path, gguf_files.make_model("apertus"), KINDS["Q8_0"], change)
    with pytest.raises(OutriderError, match=r"says block_count=4294967295, but it has \d+ tensors"):
        load(path)


@pytest.mark.parametrize("architecture, num_layers", [("gemma2", 46), ("gemma3", 62)])
def test_the_gemma_of_27b_scales_attention_by_its_width_per_head(architecture, num_layers, tmp_path):
    path = tmp_path / "model.gguf"
    for layers, expected in ((6, 64), (num_layers, 128)):
        path.unlink(missing_ok=True)
        model = gguf_files.make_model(architecture, num_hidden_layers=6, num_attention_heads=2)
        gguf_files.write(path, model, KINDS["F16"], lambda w, layers=layers: w.add_block_count(layers))
        assert gguf_reader.load_config(path, path).query_pre_attn_scalar == expected


@pytest.mark.parametrize("kernels, dtype", [(True, "float32"), (False, "auto"), (False, "float32")])
def test_without_blocks_a_file_is_dequantised_with_a_message(kernels, dtype, tmp_path, monkeypatch, caplog):
    exact = gguf_files.write(tmp_path / "model.gguf", gguf_files.make_model("llama"), gguf_files.mixed)
    if not kernels:
        monkeypatch.setattr(native, "load", lambda: False)
    with caplog.at_level(logging.WARNING, logger="outrider"):
        own = load(tmp_path / "model.gguf", dtype=dtype).model
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    said = [record.getMessage() for record in caplog.records if "dequantised to" in record.getMessage()]
    assert len(said) == 1 and str(kind).removeprefix("torch.") in said[0]
    for name, module in exact.named_modules():
        if isinstance(module, nn.Linear):
            assert torch.equal(own_weights(own, name), module.weight.to(kind).float()), name


@needs_kernels
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
def test_files_without_codes_keep_their_type_or_are_rounded(kind, tmp_path):
    gguf_files.write(tmp_path / "model.gguf", gguf_files.make_model("qwen2"), lambda _: kind)
    kinds = {layer.packed.dtype for layer in linear.packed_layers(load(tmp_path / "model.gguf").model)}
    assert kinds == {{Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}[kind]}
    rounded = load(tmp_path / "model.gguf", weights="int4").model
    assert {blocks.bits_of(layer.packed) for layer in linear.packed_layers(rounded)} == {4, 8}


def refusal(path, **options):
    with pytest.raises(OutriderError) as refused:
        load(path, **options)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_unsupported_files_are_rejected_before_weights_are_read(unread, tmp_path, monkeypatch):
    path, model = tmp_path / "model.gguf", gguf_files.make_model("llama")

    def changed(change, kind=Kind.Q8_0):
        path.unlink(missing_ok=True)
        gguf_files.write(path, model, lambda _: kind, change)
        return refusal(path)

    assert "split.count=2, but of its parts its folder holds 1: put all" in changed(lambda w: w.add_uint16("split.count", 2))
    said = changed(lambda w: w.add_float32("llama.logit_scale", 0.5))
    assert "llama.logit_scale=0.5 is not supported: put the model's config.json into" in said
    for number in (2, 1 << 20):
        said = changed(lambda w, number=number: w.add_nextn_predict_layers(number))
        assert f"nextn_predict_layers={number}, expected a number below block_count=2" in said
    said = changed(lambda w: w.add_rope_dimension_count(16))
    assert "llama.rope.dimension_count=16 is not supported, expected 64, the size of a head: put the model's" in said
    assert "llama.attention.value_length=16 is not supported, expected" in changed(lambda w: w.add_value_length(16))
    assert "llama.attention.sliding_window=16" in changed(lambda w: w.add_sliding_window(16))
    said = changed(lambda w: w.kv_data[0].pop("llama.attention.head_count"))
    assert "its header says llama.attention.head_count=None, expected a positive integer" in said
    said = changed(lambda w: w.add_tensor("blk.0.odd", np.zeros((2, 40), np.uint8), raw_dtype=Kind.Q8_1))
    assert "tensor blk.0.odd is of type Q8_1: supported are F32, F16, BF16, Q8_0" in said
    assert "weights=int8 needs a checkpoint in 16 or 32 bits or FP8, got one quantised by gguf" in (
        gguf_files.write(path, model, KINDS["Q8_0"]) and refusal(path, weights="int8")
    )
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    assert "architecture mamba: supported in GGUF files are llama, qwen2, qwen2vl, qwen3, qwen3moe, qwen3vl" in refusal(path)
    path.write_bytes(b"not a model at all")
    assert "is not a GGUF file" in refusal(path)
    path.write_bytes(b"")
    assert "is not a GGUF file" in refusal(path)
    assert "nowhere.gguf': expected a folder, a .gguf file" in refusal(tmp_path / "nowhere.gguf")
    gguf_files.write(path, model, KINDS["Q8_0"])
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert re.search(r"requires gguf: run \S+ -m pip install -e '\.\[gguf\]' in Outrider's folder", refusal(path))

    def fail(_: str) -> None:
        raise ImportError("broken\nin two lines")

    monkeypatch.setattr("outrider.runner.gguf.file.import_module", fail)
    assert refusal(path) == f"cannot read {path}: broken"


def test_entries_that_an_architecture_needs_are_named_if_they_are_missing_or_of_another_kind(unread, tmp_path):
    path, models = tmp_path / "model.gguf", {name: gguf_files.make_model(name) for name in ("gemma3", "gemma4", "phi3")}

    def changed(architecture, name, add=lambda writer: None):
        def change(writer):
            writer.kv_data[0].pop(f"{architecture}.{name}", None)
            add(writer)

        path.unlink(missing_ok=True)
        gguf_files.write(path, models[architecture], KINDS["Q8_0"], change)
        return refusal(path)

    for name in ("attention.sliding_window_pattern", "feed_forward_length", "attention.head_count_kv", "rope.freq_base"):
        assert f"model.gguf: its header lacks '{name}'" in changed("gemma4", name)
    said = changed("gemma4", "feed_forward_length", lambda w: w.add_array("gemma4.feed_forward_length", [512]))
    assert "its header is not that of a model (feed_forward_length has 1 numbers, expected 6)" in said
    said = changed("gemma3", "rope.scaling.type", lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR))
    assert "its header lacks 'rope.scaling.factor'" in said
    said = changed("gemma3", "attention.sliding_window", lambda w: w.add_string("gemma3.attention.sliding_window", "all"))
    assert "its header is not that of a model (Validation error for field 'sliding_window'" in said
    said = changed("phi3", "rope.dimension_count", lambda w: w.add_rope_dimension_count(4000))
    assert "(rope.dimension_count is 62.5 times the head size)" in said
    said = changed("phi3", "rope.scaling.type", lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE))
    assert "its header lacks 'rope_factors_short.weight'" in said


def test_a_truncated_file_is_rejected_wherever_it_is_cut(unread, tmp_path):
    whole, cut = tmp_path / "model.gguf", tmp_path / "cut.gguf"
    gguf_files.write(whole, gguf_files.make_model("llama"), KINDS["Q8_0"])
    data = whole.read_bytes()
    for length in (4, 20, 24, 100, 1000, 5000, 20_000, len(data) // 2, len(data) - 1000):
        cut.write_bytes(data[:length])
        assert "cut.gguf: the file is truncated or damaged" in refusal(cut), length


def test_damaged_text_in_the_header_is_refused_in_one_line(unread, tmp_path):
    whole, damaged = tmp_path / "model.gguf", tmp_path / "damaged.gguf"
    gguf_files.write(whole, gguf_files.make_model("llama"), KINDS["Q8_0"])
    damaged.write_bytes(whole.read_bytes().replace(b"llama", b"\xfflama", 1))
    assert "damaged.gguf: the text of general.architecture is damaged ('utf-8' codec can't decode byte 0xff" in refusal(damaged)


def test_a_list_longer_than_the_file_is_rejected_at_once(unread, tmp_path):
    whole, damaged = tmp_path / "model.gguf", tmp_path / "damaged.gguf"
    gguf_files.write(whole, gguf_files.make_model("llama"), KINDS["Q8_0"])
    data = bytearray(whole.read_bytes())
    name = b"tokenizer.ggml.tokens"
    at = data.index(name) + len(name) + 8  # after the codes of a list and of its elements
    data[at : at + 8] = (1 << 60).to_bytes(8, "little")
    damaged.write_bytes(data)
    assert "damaged.gguf: the file is truncated or damaged" in refusal(damaged)


@pytest.mark.parametrize(
    "name", ["llama.block_count", "llama.attention.head_count", "tokenizer.ggml.eos_token_id", "split.count"]
)
def test_a_list_of_strings_in_place_of_a_number_is_refused_by_its_name(name, unread, tmp_path):
    def change(writer):
        writer.kv_data[0].pop(name, None)
        writer.add_array(name, ["a", "b"])

    gguf_files.write(tmp_path / "model.gguf", gguf_files.make_model("llama"), KINDS["Q8_0"], change)
    assert f"model.gguf: {name} is a list of 2 strings" in refusal(tmp_path / "model.gguf")


def test_tensors_that_do_not_belong_to_the_model_are_named(tmp_path):
    path, model = tmp_path / "model.gguf", gguf_files.make_model("qwen3")

    def written(change=None, without=()):
        path.unlink(missing_ok=True)
        gguf_files.write(path, model, KINDS["Q8_0"], change, without)
        return refusal(path)

    assert "unexpected tensor blk.0.odd.weight for a qwen3 model" in written(
        lambda w: w.add_tensor("blk.0.odd.weight", np.zeros(4, np.float32))
    )
    assert "unexpected tensor blk.2.attn_q.weight for" in written(
        lambda w: w.add_tensor("blk.2.attn_q.weight", np.zeros((256, 256), np.float32))
    )
    assert "lacks 1 of the model's tensors, the first model.layers.1.self_attn.q_norm.weight" in written(
        without=("blk.1.attn_q_norm.weight",)
    )
    said = written(lambda w: w.add_tensor("blk.0.ffn_gate.0.weight", np.zeros((512, 256), np.float32)))
    assert "model.gguf is an old file with separate experts (blk.0.ffn_gate.0.weight): take a newer conversion" in said
    said = written(lambda w: w.add_tensor("blk.0.attn_q.weight", np.zeros((8, 256), np.float32)), ("blk.0.attn_q.weight",))
    assert "tensor blk.0.attn_q.weight is [8, 256], expected [256, 256] by the config" in said


@needs_kernels
@pytest.mark.parametrize(
    "architecture, first, second", [("qwen3next", "attn_qkv", "attn_gate"), ("granitehybrid", "gate_sh", "up_sh")]
)
def test_the_two_tensors_of_a_parameter_may_have_different_types(architecture, first, second, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "activation_bits", lambda: 32)
    monkeypatch.setattr(linear.kernels, "has_fast_bfloat16", lambda: False)

    def kind(name):
        return Kind.Q8_0 if first in name else Kind.Q4_0 if second in name else Kind.Q6_K

    model, text = gguf_files.make_model(architecture), make_text(30, 1)
    exact = gguf_files.write(tmp_path / "model.gguf", model, kind)
    runner = load(tmp_path / "model.gguf")
    joined = {name for name, module in runner.model.named_modules() if isinstance(module, linear.JoinedLinear)}
    assert joined and all(
        torch.equal(linear.weight_of(runner.model.get_submodule(name)), exact.get_submodule(name).weight) for name in joined
    )
    expected = plain_logits(exact, text)[-1]
    torch.testing.assert_close(runner.extend(["a"], [text])[0], expected, rtol=2e-4, atol=2e-4 * float(expected.abs().max()))


def test_a_file_in_parts_is_loaded_by_any_of_them(tmp_path):
    model, whole, folder = gguf_files.make_model("qwen3"), tmp_path / "whole.gguf", tmp_path / "parts"
    folder.mkdir()
    gguf_files.write(whole, model, KINDS["Q8_0"])
    gguf_files.write(folder / "model.gguf", model, KINDS["Q8_0"], tensors_a_part=10)
    parts = sorted(folder.iterdir())
    assert [part.name for part in parts] == [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    text = make_text(30, 1)
    expected = load(whole).extend(["a"], [text])[0]
    for source in (folder, parts[0], parts[2]):
        assert torch.equal(load(source).extend(["a"], [text])[0], expected)
        assert weight_files.weight_bytes(source) == sum(part.stat().st_size for part in parts)
    assert load_tokenizer(parts[1]).encode("def add") == make_tokenizer().encode("def add")
    parts[1].rename(folder / "model.gguf")
    for source in (folder, parts[0]):
        assert "split.count=3, but of its parts its folder holds 2" in refusal(source)


@pytest.mark.parametrize("name, like", [("qwen2vl", "qwen2"), ("qwen3vl", "qwen3"), ("qwen3vlmoe", "qwen3moe")])
def test_the_language_model_of_one_that_sees_images(name, like, tmp_path):
    def add(writer):
        writer.add_rope_dimension_sections([24, 20, 20, 0])
        writer.add_num_deepstack_layers(2)

    model, text = gguf_files.make_model(like), make_text(30, 1)
    exact = gguf_files.write(tmp_path / "model.gguf", model, KINDS["F16"], add, architecture=name)
    got = load(tmp_path / "model.gguf", dtype="float32").extend(["a"], [text])[0]
    torch.testing.assert_close(got, plain_logits(exact, text)[-1], rtol=1e-3, atol=1e-3)


def test_the_mtp_head_of_a_file_is_not_a_layer_of_the_model(tmp_path):
    def add_head(writer):
        writer.add_block_count(5)
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.4.nextn.eh_proj.weight", np.zeros((256, 512), np.float32))

    exact = gguf_files.write(tmp_path / "model.gguf", gguf_files.make_model("qwen35"), KINDS["F16"], add_head)
    runner, text = load(tmp_path / "model.gguf", dtype="float32"), make_text(30, 1)
    expected = plain_logits(exact, text)[-1]
    assert runner.num_layers == 4
    torch.testing.assert_close(runner.extend(["a"], [text])[0], expected, rtol=1e-3, atol=1e-3)


def test_halves_of_experts_of_different_types_are_refused(tmp_path):
    model = gguf_files.make_model("qwen3moe")
    gguf_files.write(tmp_path / "model.gguf", model, lambda name: Kind.Q4_K if "gate_exps" in name else Kind.Q8_0)
    said = refusal(tmp_path / "model.gguf")
    assert (
        "tensors blk.0.ffn_gate_exps.weight and blk.0.ffn_up_exps.weight are of types Q4_K and Q8_0: expected one type" in said
    )


def test_tensors_of_experts_that_are_missing_or_too_many_are_named(tmp_path):
    model, path = gguf_files.make_model("qwen3moe"), tmp_path / "model.gguf"
    gguf_files.write(path, model, KINDS["Q8_0"], without=("blk.1.ffn_up_exps.weight",))
    assert "has blk.1.ffn_gate_exps.weight without the other half of model.layers.1.mlp.experts.gate_up_proj" in refusal(path)
    path.unlink()
    extra = np.zeros((4, 256), np.float32)
    gguf_files.write(path, model, KINDS["Q8_0"], lambda w: w.add_tensor("blk.0.ffn_gate_exps.bias", extra))
    assert "unexpected tensor blk.0.ffn_gate_exps.bias for a qwen3_moe model" in refusal(path)


@needs_kernels
def test_halves_with_scales_of_different_widths_keep_their_values(tmp_path):
    """Gates that are powers of two get scales that fit bfloat16, the others only fit float16."""
    model = gguf_files.make_model("qwen3moe")
    for layer in model.model.layers:
        gates = layer.mlp.experts.gate_up_proj.data[:, :256]
        gates.copy_(torch.exp2(torch.floor(torch.log2(gates.abs().clamp(min=1e-3)))) * gates.sign())
    exact = gguf_files.write(tmp_path / "model.gguf", model, KINDS["Q4_0"])
    own = load(tmp_path / "model.gguf").model
    for layer, expected in zip(own.model.layers, exact.model.layers, strict=True):
        up, _ = experts_in_file_layout(expected.mlp.experts)
        assert torch.equal(linear.weight_of(layer.mlp.experts.up).float(), up)


@needs_kernels
def test_scales_that_are_nan_are_rejected_with_the_name_of_their_tensor(tmp_path):
    path, broken = tmp_path / "model.gguf", np.full((256, 34), 0xFF, np.uint8)  # NaN in float16
    gguf_files.write(
        path,
        gguf_files.make_model("llama"),
        KINDS["Q8_0"],
        lambda w: w.add_tensor("blk.1.attn_q.weight", np.tile(broken, (1, 8)), raw_dtype=Kind.Q8_0),
        ("blk.1.attn_q.weight",),
    )
    assert "tensor blk.1.attn_q.weight: scales are NaN or infinite" in refusal(path)


@pytest.mark.parametrize("index", [320, 2**32 - 1])
def test_a_special_token_beyond_the_vocabulary_is_refused(index, tmp_path):
    def change(writer):
        writer.add_uint32("tokenizer.ggml.padding_token_id", index)

    gguf_files.write(tmp_path / "model.gguf", gguf_files.make_model("llama"), KINDS["Q8_0"], change)
    with pytest.raises(OutriderError, match=f"its padding token has the id {index}, but its vocabulary has 320 tokens"):
        tokenizers.load_tokenizer(tmp_path / "model.gguf")


def test_the_image_encoder_beside_a_file_takes_no_memory(tmp_path, monkeypatch):
    gguf_files.write(tmp_path / "model.gguf", gguf_files.make_model("llama"), KINDS["Q8_0"])
    size = (tmp_path / "model.gguf").stat().st_size
    (tmp_path / "mmproj-model.gguf").write_bytes(bytes(2 * size))
    monkeypatch.setattr(memory, "total_memory", lambda: 2 * size)
    load(tmp_path)


def test_exponents_beyond_float32_are_rejected(tmp_path):
    rows = torch.zeros(32, 17, dtype=torch.uint8)
    rows[0, 0] = 253
    with pytest.raises(OutriderError, match="NaN or exponents beyond float32"):
        codes.pack(rows, "MXFP4")


def test_the_files_beside_a_file_do_not_count_if_the_file_was_given(tmp_path):
    gguf_files.write(tmp_path / "model.gguf", gguf_files.make_model("llama"), KINDS["Q8_0"])
    make_tokenizer(300).save_pretrained(tmp_path)
    text = "return first + second"
    found = {name: load_tokenizer(str(tmp_path / name)).encode(text) for name in ("model.gguf", "")}
    assert found["model.gguf"] == make_tokenizer().encode(text) != found[""] == make_tokenizer(300).encode(text)


def test_a_number_of_layers_beyond_the_tensors_is_refused_before_a_config_is_made(unread, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_files.write(path, gguf_files.make_model("qwen3"), KINDS["Q8_0"], change=lambda w: w.add_block_count(1 << 30))
    assert f"its header says block_count={1 << 30}, but it has" in refusal(path)


def test_entries_that_change_granite_or_lfm2_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    gguf_files.write(
        path, gguf_files.make_model("granite"), KINDS["F16"], lambda w: w.add_bool("granite.rope.scaling.finetuned", False)
    )
    assert "attention without rotary positions, which is not supported" in refusal(path)
    path.unlink()
    gguf_files.write(path, gguf_files.make_model("lfm2"), KINDS["F16"], lambda w: w.add_head_count_kv(2))
    assert "attention.head_count_kv=2, expected a number for each layer" in refusal(path)


@pytest.mark.parametrize(
    "architecture, change, said",
    [
        (
            "cohere2",
            lambda w: w.add_rope_dimension_count(32),
            "rope.dimension_count=32 is not supported, expected 64, the size of a head",
        ),
        ("afmoe", lambda w: w.add_expert_weights_norm(False), "expert_weights_norm is not set"),
        ("afmoe", lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX), "expert_gating_func=1, expected 2"),
        ("afmoe", lambda w: w.add_expert_group_count(2), "experts in 2 groups, 1 of them chosen: expected no groups"),
        ("afmoe", lambda w: w.add_expert_group_used_count(2), "experts in 1 groups, 2 of them chosen: expected no groups"),
        ("dots1", lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX), "expert_gating_func=1, expected 2"),
        ("hunyuan-moe", lambda w: w.add_expert_shared_count(2), "2 shared experts, widths of experts [512, 512]: expected one"),
        (
            "hunyuan-moe",
            lambda w: w.add_expert_shared_feed_forward_length(256),
            "1 shared experts, widths of experts [512, 256]: expected one, all as wide as a dense layer",
        ),
        ("olmoe", lambda w: w.add_clamp_kqv(8.0), "olmoe.attention.clamp_kqv=8.0 is not supported"),
        ("starcoder2", lambda w: w.add_sliding_window(16), "starcoder2.attention.sliding_window=16 is not supported"),
    ],
)
def test_what_the_model_of_an_architecture_cannot_do_is_refused(architecture, change, said, unread, tmp_path):
    gguf_files.write(tmp_path / "model.gguf", gguf_files.make_model(architecture), KINDS["F16"], change)
    assert said in refusal(tmp_path / "model.gguf")


@pytest.mark.parametrize("kind, model_type", [("SIGMOID", "deepseek_v3"), ("SOFTMAX", "deepseek_v2")])
def test_newer_files_of_deepseek_state_what_routers_do(kind, model_type, tmp_path):
    path, code = tmp_path / "model.gguf", gguf.ExpertGatingFuncType[kind]
    gguf_files.write(path, gguf_files.make_model("deepseek2"), KINDS["F16"], lambda w: w.add_expert_gating_func(code))
    assert gguf_reader.GgufFile.open(path).config().model_type == model_type


def test_the_factors_of_falcon_h1_are_in_the_weights(tmp_path):
    """Also if the config beside the file has them. Embeddings and output head have different ones."""
    model, path, text = gguf_files.make_model("falcon-h1"), tmp_path / "model.gguf", make_text(30, 1)
    exact = gguf_files.write(path, model, KINDS["F16"])
    factors = {"embedding_multiplier": 5.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.5, "attention_in_multiplier": 0.5}
    factors |= {"attention_out_multiplier": 0.5, "ssm_in_multiplier": 0.5, "ssm_out_multiplier": 0.5}
    gguf_configs.CONFIGS["falcon-h1"](
        **factors, mlp_multipliers=[0.5, 0.25], ssm_multipliers=[0.5, 0.25, 0.7, 0.8, 0.9]
    ).save_pretrained(tmp_path)
    expected = plain_logits(exact, text)[-1]
    for source in (path, tmp_path):
        got = load(source, dtype="float32").extend(["a"], [text])[0]
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    path.unlink()
    gguf_files.write(path, model, KINDS["F16"], without=("output.weight",))
    assert "lacks 1 of the model's tensors, the first lm_head.weight" in refusal(path)


@pytest.mark.parametrize("architecture", ["gemma3n", "gemma4"])
def test_keys_and_values_that_gemma_s_last_layers_do_not_use_are_left_out(architecture, tmp_path):
    """Google's checkpoints have them, and llama.cpp keeps them."""
    model, text = gguf_files.make_model(architecture), make_text(30, 1)
    size = model.model.layers[2].self_attn.head_dim  # of a layer of full attention

    def add(writer):
        for part in ("attn_k", "attn_v"):
            writer.add_tensor(f"blk.5.{part}.weight", np.full((2 * size, 256), np.nan, np.float32))
        writer.add_tensor("blk.5.attn_k_norm.weight", np.full(size, np.nan, np.float32))

    exact = gguf_files.write(tmp_path / "model.gguf", model, KINDS["F16"], add)
    got = load(tmp_path / "model.gguf", dtype="float32").extend(["a"], [text])[0]
    torch.testing.assert_close(got, plain_logits(exact, text)[-1], rtol=1e-3, atol=1e-3)
    (tmp_path / "model.gguf").unlink()
    gguf_files.write(tmp_path / "model.gguf", model, KINDS["F16"], without=("blk.3.attn_k.weight",))
    assert "lacks 1 of the model's tensors, the first model.layers.3.self_attn.k_proj.weight" in refusal(
        tmp_path / "model.gguf"
    )


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_codes_that_blocks_hold_as_they_are_are_not_converted(name, monkeypatch):
    monkeypatch.setattr(blocks, "_signed", lambda *_, **__: pytest.fail("codes were converted"))
    rng = np.random.default_rng(0)
    values = rng.normal(size=(64, 96)).astype(np.float32)
    raw = gguf_files.gguf.quants.quantize(values, Kind[name])
    packed = codes.pack(torch.from_numpy(raw), name)
    expected = gguf_files.gguf.quants.dequantize(raw, Kind[name])
    assert np.array_equal(blocks.unpack(packed, 64, 96).numpy(), expected)


def test_blocks_are_not_copied_before_they_are_packed(tmp_path, recwarn):
    path = tmp_path / "model.gguf"
    gguf_files.write(path, gguf_files.make_model("llama"), KINDS["Q8_0"])
    tensor = gguf_reader.GgufFile.open(path).tensors["blk.0.ffn_up.weight"]
    rows = gguf_reader.read_tensor(lambda data, _: data, tensor, in_blocks=True)
    assert np.shares_memory(rows.numpy(), tensor.data) and not recwarn.list


def test_a_tokenizer_belongs_to_files_with_the_same_vocabulary(tmp_path):
    def write(name, change=lambda writer: None):
        gguf_files.write(tmp_path / name, gguf_files.make_model("llama"), KINDS["Q8_0"], change)
        return tmp_path / name

    own = tokenizers.load_tokenizer(write("target.gguf"))
    assert tokenizers.is_tokenizer_of(own, tmp_path / "target.gguf")
    assert tokenizers.is_tokenizer_of(own, write("draft.gguf", lambda writer: writer.add_chat_template("other")))
    assert not tokenizers.is_tokenizer_of(own, write("other.gguf", lambda writer: writer.add_eos_token_id(7)))
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(tmp_path / "target.gguf", folder)
    assert tokenizers.is_tokenizer_of(own, folder)
