"""Hub ids of GGUF repositories name files, as in llama.cpp."""

from __future__ import annotations

import huggingface_hub
import pytest

from outrider import hub
from outrider.errors import OutriderError

FILES = [
    "README.md",
    "Qwen3-8B-Q4_K_M.gguf",
    "Qwen3-8B-Q8_0.gguf",
    "Qwen3-8B-UD-Q2_K_XL.gguf",
    "Qwen3-8B-DFlash-Q8_0.gguf",
    "BF16/Qwen3-8B-BF16-00002-of-00002.gguf",
    "BF16/Qwen3-8B-BF16-00001-of-00002.gguf",
    "mmproj-F16.gguf",
    "imatrix_unsloth.gguf",
]


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Provide a hub with one repository, and return what was downloaded."""
    found = []

    def download(repository, names):
        assert repository == "unsloth/Qwen3-8B-GGUF"
        found.append(names)
        return tmp_path

    monkeypatch.setattr(hub, "is_reachable", lambda: True)
    monkeypatch.setattr(hub, "_listed", lambda repository: hub.Repository("c0", dict.fromkeys(FILES, 1)))
    monkeypatch.setattr(hub, "_downloaded", download)
    return found


@pytest.mark.parametrize(
    "quantisation, parts",
    [
        ("", ["Qwen3-8B-Q4_K_M.gguf"]),
        (":Q8_0", ["Qwen3-8B-Q8_0.gguf"]),
        (":q8_0", ["Qwen3-8B-Q8_0.gguf"]),
        (":UD-Q2_K_XL", ["Qwen3-8B-UD-Q2_K_XL.gguf"]),
        (":Q2_K_XL", ["Qwen3-8B-UD-Q2_K_XL.gguf"]),
        (":Qwen3-8B-Q8_0.gguf", ["Qwen3-8B-Q8_0.gguf"]),
        (
            ":BF16/Qwen3-8B-BF16-00002-of-00002.gguf",
            ["BF16/Qwen3-8B-BF16-00001-of-00002.gguf", "BF16/Qwen3-8B-BF16-00002-of-00002.gguf"],
        ),
        (":BF16", ["BF16/Qwen3-8B-BF16-00001-of-00002.gguf", "BF16/Qwen3-8B-BF16-00002-of-00002.gguf"]),
    ],
)
def test_the_file_of_a_quantisation_is_downloaded(quantisation, parts, asked, tmp_path):
    assert hub.local_gguf(f"unsloth/Qwen3-8B-GGUF{quantisation}") == str(tmp_path / parts[0])
    assert asked == [parts]


def test_an_unknown_quantisation_is_refused_with_those_that_exist(asked):
    with pytest.raises(OutriderError, match=r"has no file of Q3_K_M; it has BF16, Q4_K_M, Q8_0, UD-Q2_K_XL$"):
        hub.local_gguf("unsloth/Qwen3-8B-GGUF:Q3_K_M")
    assert not asked


def test_without_a_usual_quantisation_the_only_one_is_taken_and_others_must_be_named():
    assert hub.chosen("a/b-GGUF", ["b.IQ2_S.gguf"], None) == ["b.IQ2_S.gguf"]
    with pytest.raises(OutriderError, match=r"none of Q4_K_M, UD-Q4_K_XL, Q8_0: name one as a/b-GGUF:TYPE; it has F16, IQ2_S$"):
        hub.chosen("a/b-GGUF", ["b-IQ2_S.gguf", "b-F16.gguf"], None)
    with pytest.raises(OutriderError, match="it has no GGUF files of models"):
        hub.chosen("a/b-GGUF", ["README.md", "mmproj-F16.gguf"], None)


def test_a_quantisation_may_be_named_as_qwen_and_nvidia_name_theirs():
    names = ["phi-3-fp16.gguf", "phi-3-q4.gguf", "phi-3-NVFP4.gguf"]
    assert hub.chosen("a/b-GGUF", names, "fp16") == ["phi-3-fp16.gguf"]
    assert hub.chosen("a/b-GGUF", names, "NVFP4") == ["phi-3-NVFP4.gguf"]


def test_a_repository_with_another_name_is_searched_for_the_quantisation_that_is_named(monkeypatch):
    monkeypatch.setattr(hub, "is_reachable", lambda: True)
    monkeypatch.setattr(hub, "_listed", lambda repository: hub.Repository("c0", {"model.safetensors": 1}))
    with pytest.raises(OutriderError, match=r"^Qwen/Qwen3-8B has no file of Q4_K_M; it has no GGUF files of models$"):
        hub.local_gguf("Qwen/Qwen3-8B:Q4_K_M")


def test_without_the_hub_the_cache_is_searched(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    monkeypatch.setattr(hub, "_listed", lambda *_: pytest.fail("the hub was asked"))
    (tmp_path / "b-Q8_0.gguf").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert hub.local_gguf("a/b-GGUF") == str(tmp_path / "b-Q8_0.gguf")
    with pytest.raises(OutriderError, match=r"has no file of F16; it has Q8_0 in the download cache, and .* is unreachable$"):
        hub.local_gguf("a/b-GGUF:F16")

    def absent(*_, **__):
        raise FileNotFoundError("no such\nrepository")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    with pytest.raises(
        OutriderError, match=r"no model 'a/b-GGUF': it is not in the download cache, and the .* is unreachable: "
    ) as error:
        hub.local_gguf("a/b-GGUF")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("source", ["Qwen/Qwen3-8B", "model.gguf", "./b-GGUF", None, 3, "a/b/c-GGUF"])
def test_other_sources_stay_as_they_are(source, asked):
    assert hub.local_gguf(source) is source and not asked


def test_a_folder_of_that_name_is_no_hub_id(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b-GGUF").mkdir(parents=True)
    assert hub.local_gguf("a/b-GGUF") == "a/b-GGUF" and not asked


def test_the_hub_is_not_asked_if_transformers_must_not(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # as the package sets it for TRANSFORMERS_OFFLINE
    monkeypatch.setattr(hub.socket, "create_connection", lambda *_, **__: pytest.fail("the hub was asked"))
    assert not hub.is_reachable.__wrapped__()
