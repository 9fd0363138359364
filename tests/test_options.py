"""Declared options: values of any type are normalised or rejected in one line that names the option."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from wild import WILD

from outrider.engine.options import POLICY_ATTRIBUTES, PROPOSER_ATTRIBUTES, Speculation
from outrider.engine.policy import LengthPolicy
from outrider.options import declared, shown
from outrider.proposers.base import Proposer
from outrider.runner import RunnerConfig
from outrider.server.config import ServerConfig
from outrider.types import OutriderError, SamplingParams

OPTIONS = [(config, name) for config in (SamplingParams, RunnerConfig, Speculation, ServerConfig) for name in declared(config)]


def refusal(config, **values):
    with pytest.raises(OutriderError) as caught:
        config(**values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("config", "name"), OPTIONS, ids=[f"{config.__name__}-{name}" for config, name in OPTIONS])
@given(value=WILD)
@example(value="END")
@example(value=10**5000)
@example(value=np.array([3, 1]))
@example(value=torch.tensor([3, 1]))
@settings(max_examples=60, deadline=None)
def test_values_of_any_type_are_normalised_or_rejected_in_one_line(config, name, value):
    try:
        taken = getattr(config(**{name: value}), name)
    except OutriderError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
        assert name in str(error) or "unknown" in str(error)
        return
    again = getattr(config(**{name: taken}), name)
    assert again == taken and type(again) is type(taken)
    assert not isinstance(taken, (bytes, float)) or math.isfinite(taken)
    assert not isinstance(taken, (np.generic, np.ndarray, torch.Tensor, list))


def test_an_error_is_one_line_of_bounded_length_whatever_it_quotes():
    message = str(OutriderError("invalid name 'a\nb': " + "x" * 5000 + "; rename it"))
    assert len(message) < 700 and "\n" not in message
    assert message.startswith("invalid name 'a b': xx") and message.endswith("xx; rename it")


def test_a_single_stop_string_is_not_split_into_characters():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["END", "\n\n"]).stop == ("END", "\n\n")


def test_numpy_and_torch_numbers_become_python_numbers():
    params = SamplingParams(
        max_tokens=np.int64(7),
        temperature=np.float32(0.5),
        seed=torch.tensor(3),
        ignore_eos=np.bool_(True),
        stop_token_ids=np.array([4, 5]),
        banned_token_ids=torch.tensor([6]),
        allowed_token_ids=range(9),
        logit_bias={np.int64(3): np.float64(-math.inf)},
    )
    assert (params.max_tokens, params.temperature, params.seed, params.ignore_eos) == (7, 0.5, 3, True)
    assert (params.stop_token_ids, params.banned_token_ids) == ((4, 5), (6,))
    assert params.allowed_token_ids == tuple(range(9)) and params.logit_bias == {3: -math.inf}
    config = RunnerConfig(dtype=torch.float32, device=torch.device("cpu"), max_len=np.int32(64))
    assert (config.dtype, config.device, config.max_len) == ("float32", "cpu", 64)


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (SamplingParams, {"max_tokens": 0}, "invalid max_tokens 0: expected a whole number, at least 1"),
        (SamplingParams, {"max_tokens": 8.0}, "invalid max_tokens 8.0: expected a whole number, at least 1"),
        (SamplingParams, {"n": True}, "invalid n True: expected a whole number, at least 1, at most 16384"),
        (
            SamplingParams,
            {"temperature": "1"},
            "invalid temperature '1': expected a finite number, at least 0, at most 1000000",
        ),
        (SamplingParams, {"top_p": 0}, "invalid top_p 0: expected a finite number, above 0, at most 1"),
        (
            SamplingParams,
            {"top_k": 2**31},
            "invalid top_k 2147483648: expected a whole number, at least -1, at most 2147483647",
        ),
        (SamplingParams, {"ignore_eos": "no"}, "invalid ignore_eos 'no': expected True or False"),
        (SamplingParams, {"stop": ""}, "invalid stop '': expected text or a list of texts, none of them empty"),
        (SamplingParams, {"stop": b"END"}, "invalid stop b'END': expected text or a list of texts, none of them empty"),
        (SamplingParams, {"stop_token_ids": 5}, "invalid stop_token_ids 5: expected a list of token ids from 0 on"),
        (SamplingParams, {"banned_token_ids": [-1]}, "invalid banned_token_ids [-1]: expected a list of token ids from 0 on"),
        (
            SamplingParams,
            {"logit_bias": {3: 1e31}},  # could be infinite in float32 at a low temperature
            "invalid logit_bias {3: 1e+31}: expected a mapping from token ids to numbers from -1e30 to 1e30, or minus infinity",
        ),
        (SamplingParams, {"grammar": {"type": "json"}}, "invalid grammar {'type': 'json'}: expected a Grammar or None"),
        (RunnerConfig, {"device": "gpu"}, "invalid device 'gpu': expected auto or a torch device, such as cpu, cuda or cuda:1"),
        (RunnerConfig, {"compile": True}, "invalid compile True: expected auto, always or never"),
        (Speculation, {"same_text": "false"}, "invalid same_text 'false': expected True or False"),
        (Speculation, {"draft": 7}, "invalid draft 7: expected a folder, a hub id or a loaded transformers model or None"),
        (
            Speculation,
            {"proposer": SimpleNamespace(propose=1)},
            "invalid proposer namespace(propose=1): expected a Proposer, made from a subclass of outrider.Proposer or None",
        ),
        (
            Speculation,
            {"verifier": "typical", "same_text": True},
            "same_text=True needs a lossless verifier, and this one is lossy: omit one of the two",
        ),
        (
            SamplingParams,
            {"max_tokens": 10**12},
            "invalid max_tokens 1000000000000: expected a whole number, at least 1, at most 2147483647",
        ),
        (Speculation, {"verifier": "nonsense"}, "unknown verifier 'nonsense'; known: rejection, block, exact, typical"),
    ],
)
def test_an_error_names_the_value_and_what_was_expected(config, values, message):
    assert refusal(config, **values) == message


@pytest.mark.parametrize(
    ("name", "interface", "attributes"),
    [("num_draft_tokens", LengthPolicy, POLICY_ATTRIBUTES), ("proposer", Proposer, PROPOSER_ATTRIBUTES)],
)
def test_a_custom_policy_or_proposer_must_have_every_attribute_of_the_interface(name, interface, attributes):
    assert set(attributes) == {each for each in vars(interface) if not each.startswith("_")}
    Speculation(**{name: SimpleNamespace(**dict.fromkeys(attributes))})
    for missing in attributes:
        lacking = SimpleNamespace(**{each: None for each in attributes if each != missing})
        assert refusal(Speculation, **{name: lacking}).startswith(f"invalid {name} namespace(")


def test_ignore_eos_and_min_tokens_are_rejected_with_a_grammar():
    class Anything:
        def matcher(self):
            return None

    assert "ignore_eos=True cannot be combined with a grammar" in refusal(SamplingParams, grammar=Anything(), ignore_eos=True)
    assert "min_tokens=2 cannot be combined with a grammar" in refusal(SamplingParams, grammar=Anything(), min_tokens=2)


def test_min_tokens_above_max_tokens_is_rejected():
    expected = "min_tokens=9 exceeds max_tokens=8: lower min_tokens or raise max_tokens"
    assert refusal(SamplingParams, min_tokens=9, max_tokens=8) == expected
    assert SamplingParams(min_tokens=8, max_tokens=8).min_tokens == 8


def test_a_value_is_quoted_on_one_short_line():
    assert shown(torch.zeros(3, 3)) == "tensor([[0., 0., 0.], [0., 0., 0.], [0., 0., 0.]])"
    assert shown("x" * 500).endswith("... (type str)") and len(shown("x" * 500)) < 90
    assert shown(10**5000) == "of type int"
