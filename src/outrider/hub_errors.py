"""Reasons of failed requests, failed downloads and unusable repositories of the Hugging Face hub, with what to do."""

from __future__ import annotations

import errno
from collections.abc import Collection

from outrider.errors import first_line
from outrider.files import ADAPTER_ADVICE

HF_LOGIN = "log in with hf auth login, or set HF_TOKEN"
# Names of httpx's exceptions: the hub client uses another package of them in each version.
NO_CONNECTION = frozenset({"ConnectError", "ConnectTimeout", "ProxyError"})


def what_it_is(names: Collection[str]) -> str | None:
    """Say what a repository without a config.json or without weights holds; None if unknown."""
    if "adapter_config.json" in names:
        return f"it is an adapter (LoRA); {ADAPTER_ADVICE}"
    if "model_index.json" in names:
        return "it is a diffusion model, expected a causal language model"
    if any(name.endswith(".gguf") for name in names):
        return "it has GGUF files only; name one by its type, as owner/name:Q4_K_M"
    if "params.json" in names or ("config.json" not in names and any(name.endswith(".pth") for name in names)):
        return "its weights are in the authors' own format; look for the same model in transformers' format (-hf)"
    if any(name.endswith((".onnx", "openvino_model.xml")) for name in names):
        return "its weights are for ONNX or OpenVINO; choose the model from which they were made"
    return None


def is_unreachable(error: BaseException) -> bool:
    """Return whether a request failed because there is no connection to the hub."""
    return not NO_CONNECTION.isdisjoint(kind.__name__ for kind in type(error).__mro__)


def explained(repo_id: str, error: BaseException) -> str:
    """Return the reason of a failed request or download, and what to do, in one line."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # the failed request
    if type(error).__name__ in ("InvalidURL", "UnsupportedProtocol"):
        return f"HF_ENDPOINT={constants.ENDPOINT} is not a URL such as https://huggingface.co: {first_line(error)}"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else 0
    if isinstance(error, GatedRepoError):
        return f"{repo_id} is gated: ask for access at {constants.ENDPOINT}/{repo_id}, then {HF_LOGIN}"
    if isinstance(error, RepositoryNotFoundError):
        return f"no model {repo_id!r} on the Hugging Face hub: check owner and name; if it is private, {HF_LOGIN}"
    if status == 401:
        return f"the Hugging Face hub does not accept your token: {HF_LOGIN}"
    if status == 429:
        return f"the Hugging Face hub limits your requests: wait some minutes, then repeat the command, or {HF_LOGIN}"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return f"cannot write to the download cache {constants.HF_HUB_CACHE}: set HF_HOME to a folder that you can write to"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of the download cache {constants.HF_HUB_CACHE} is full: free space, then repeat the command"
    why = f"the Hugging Face hub answers with status {status}" if status else first_line(error)
    return f"cannot download {repo_id}: {why}; repeat the command later: it continues with the files that are missing"
