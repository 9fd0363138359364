"""Hub ids of GGUF repositories name files, as in llama.cpp."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

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

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
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
    assert hub.files_of_quantisation("a/b-GGUF", ["b.IQ2_S.gguf"], None) == ["b.IQ2_S.gguf"]
    with pytest.raises(OutriderError, match=r"none of Q4_K_M, UD-Q4_K_XL, Q8_0: name one as a/b-GGUF:TYPE; it has F16, IQ2_S$"):
        hub.files_of_quantisation("a/b-GGUF", ["b-IQ2_S.gguf", "b-F16.gguf"], None)
    with pytest.raises(OutriderError, match="it has no GGUF files of models"):
        hub.files_of_quantisation("a/b-GGUF", ["README.md", "mmproj-F16.gguf"], None)
    names = ["b-Q8_0.gguf", "b.mmproj-Q8_0.gguf", "b-mmproj-f16.gguf", "b.imatrix.gguf"]
    assert hub.files_of_quantisation("a/b-GGUF", names, None) == ["b-Q8_0.gguf"]
    with pytest.raises(OutriderError, match="has no file of F16"):
        hub.files_of_quantisation("a/b-GGUF", names, "F16")


def test_a_quantisation_may_be_named_as_qwen_and_nvidia_name_theirs():
    names = ["phi-3-fp16.gguf", "phi-3-q4.gguf", "phi-3-NVFP4.gguf"]
    assert hub.files_of_quantisation("a/b-GGUF", names, "fp16") == ["phi-3-fp16.gguf"]
    assert hub.files_of_quantisation("a/b-GGUF", names, "NVFP4") == ["phi-3-NVFP4.gguf"]


def test_a_repository_with_another_name_is_searched_for_the_quantisation_that_is_named(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_listed", lambda repository: hub.Repository("c0", {"model.safetensors": 1}))
    with pytest.raises(OutriderError, match=r"^Qwen/Qwen3-8B has no file of Q4_K_M; it has no GGUF files of models$"):
        hub.local_gguf("Qwen/Qwen3-8B:Q4_K_M")


def test_without_the_hub_the_cache_is_searched(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "_listed", lambda *_: pytest.fail("the hub was asked"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        OutriderError, match=r"no model 'a/b-GGUF': .* nor in the download cache, and .* HF_HUB_OFFLINE is set: check"
    ):
        hub.local_gguf("a/b-GGUF")
    repository = tmp_path / "models--a--b-GGUF"
    file = repository / "snapshots" / "c0" / "b-Q8_0.gguf"
    file.parent.mkdir(parents=True)
    file.touch()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0")
    assert hub.local_gguf("a/b-GGUF") == str(file)
    with pytest.raises(
        OutriderError, match=r"has no file of F16; it has Q8_0 in the download cache, and .* HF_HUB_OFFLINE is set$"
    ):
        hub.local_gguf("a/b-GGUF:F16")


def test_a_hub_that_fails_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_listed", lambda *_: hub.Repository("", {}, problem=hub.FAILS))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(OutriderError, match="nor in the download cache, and the Hugging Face hub fails: check the name"):
        hub.local_gguf("a/b-GGUF")
    for repository, name in (("a--b-GGUF", "b-Q8_0.gguf"), ("a--c", "config.json")):
        folder = tmp_path / f"models--{repository}"
        (folder / "snapshots" / "c0").mkdir(parents=True)
        (folder / "snapshots" / "c0" / name).write_text("{}")
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("c0")
    for load, source in ((hub.local_gguf, "a/b-GGUF:F16"), (hub.fetch_weights, "a/c"), (hub.fetch, "a/d")):
        with pytest.raises(OutriderError, match="in the download cache, and the Hugging Face hub fails"):
            load(source)


def test_a_cached_file_has_a_hub_id_if_it_is_the_newest(monkeypatch, tmp_path):
    repository = tmp_path / "hub" / "models--a--b-GGUF"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c1")
    for commit in ("c0", "c1"):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "b-Q8_0.gguf").touch()
    (tmp_path / "link").symlink_to(tmp_path / "hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "link"))
    newest, older = (str(repository / "snapshots" / commit / "b-Q8_0.gguf") for commit in ("c1", "c0"))
    assert hub.id_of_cached(newest) == "a/b-GGUF:b-Q8_0.gguf"
    assert hub.id_of_cached(older) == older and hub.id_of_cached("/x/b.gguf") == "/x/b.gguf"


def test_files_without_a_type_are_listed_by_name():
    names = ["ggml-model-i2_s.gguf", "model-F16.gguf"]
    with pytest.raises(OutriderError, match=r"^a/b has no file of I2_S; it has F16, ggml-model-i2_s\.gguf$"):
        hub.files_of_quantisation("a/b", names, "I2_S")
    assert hub.files_of_quantisation("a/b", names, names[0]) == names[:1]


@pytest.mark.parametrize(
    "names",
    [["gemma-3-1b-it-Q8_0.gguf", "gemma-3-27b-it-Q8_0.gguf"], ["Qwen3-8B-Q8_0.gguf", "eagle3-Q8_0.gguf"]],
    ids=["two models", "head with a shorter name"],
)
def test_of_files_of_several_models_one_must_be_named(names):
    said = rf"^a/b has files of several models: name one as a/b:FILE; it has {', '.join(names)}$"
    with pytest.raises(OutriderError, match=said):
        hub.files_of_quantisation("a/b", names, None)
    assert hub.files_of_quantisation("a/b", names, names[0]) == names[:1]


@pytest.mark.parametrize("source", ["Qwen/Qwen3-8B", "model.gguf", "models/x.gguf", "./b-GGUF", None, 3, "a/b/c-GGUF"])
def test_other_sources_stay_as_they_are(source, asked):
    assert hub.local_gguf(source) is source and not asked


def test_a_repository_may_be_named_like_a_file_in_capitals():
    assert hub.is_gguf_id("a/b-iMat.GGUF") and hub.is_gguf_id("a/b.gguf:Q8_0") and not hub.is_gguf_id("a/b.gguf")


def test_a_folder_of_that_name_is_no_hub_id(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b-GGUF").mkdir(parents=True)
    assert hub.local_gguf("a/b-GGUF") == "a/b-GGUF" and not asked
