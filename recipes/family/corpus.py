"""Training documents: sources, cleaning and held-out split.

Only the files named in `SOURCES` and the interpreter's standard library are read.
"""

from __future__ import annotations

import ast
import hashlib
import lzma
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import chats, written
from .config import ASSISTANT, USER, documents_of

HELD_OUT_SHARE = 0.005
LONG_LINE = 25  # letters and digits; shorter lines repeat by chance
MOST_REPEATED = 0.3  # maximum share of repeated long lines, above which a document is a duplicate
FIRST = ("tales", "thealgorithms", "gsm8k")  # a document found in two sources is kept in these
STDLIB_SKIP = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
STDLIB_SKIP |= {"encodings", "pydoc_data", "ensurepip", "turtledemo"}


@dataclass(frozen=True)
class Source:
    """One source of text. `file` is None for the standard library and for derived documents."""

    name: str
    file: str | None
    weight: float  # share of the training rows
    in_total: float  # weight in the total bits per byte, equal for all editions of the family
    origin: str
    licence: str


WRITTEN, OWN = "`recipes/family/written/`: templates written for this family with a large language model", "this project's"
SOURCES = (
    Source("functions", None, 0.10, 0.30, "single functions cut from the four sources of Python below", "as their files"),
    Source("package_functions", None, 0.10, 0, "single functions cut from the packages", "as their files"),
    Source("thealgorithms", "code_thealgorithms_mit.txt.xz", 0.04, 0.12, "TheAlgorithms/Python", "MIT"),
    Source(
        "packages",
        "code_packages_permissive.txt.xz",
        0.06,
        0,
        "40 packages of the Python package index",
        "BSD, MIT, Apache-2.0",
    ),
    Source("stdlib", None, 0.04, 0.06, "the Python interpreter's standard library", "PSF-2.0"),
    Source("networkx", "code_networkx_bsd.txt.xz", 0.02, 0.04, "networkx/networkx", "BSD-3-Clause"),
    Source("sympy", "code_sympy_bsd.txt.xz", 0.02, 0.03, "sympy/sympy", "BSD-3-Clause"),
    Source("tales", "tales_en.txt.xz", 0.11, 0, "tales of mlschmitt/classic-books-markdown", "public domain"),
    Source("books", "books_en.txt.xz", 0.11, 0.29, "mlschmitt/classic-books-markdown", "public domain"),
    Source("peps", "docs_peps_pd.txt.xz", 0.02, 0.04, "python/peps", "public domain / CC0"),
    Source("rust", "docs_rust_mit_apache.txt.xz", 0.01, 0.03, "rust-lang/book, rust-lang/reference", "MIT or Apache-2.0"),
    Source("cpp", "docs_cpp_ccby.txt.xz", 0.01, 0.01, "MicrosoftDocs/cpp-docs", "CC-BY-4.0"),
    Source("tldr", "docs_tldr_en_ccby.txt.xz", 0.02, 0.02, "tldr-pages/tldr", "CC-BY-4.0"),
    Source("gsm8k", "math_gsm8k_train_mit.txt.xz", 0.03, 0.06, "openai/grade-school-math, train split", "MIT"),
    Source("chats", None, 0.03, 0, "short conversations made of tldr, tales and templates of our own", "as their files"),
    Source("written_functions", None, 0.12, 0, WRITTEN, OWN),
    Source("written_tales", None, 0.12, 0, WRITTEN, OWN),
    Source("written_chats", None, 0.04, 0, WRITTEN, OWN),
)
CODE = ("thealgorithms", "stdlib", "networkx", "sympy")


@dataclass(frozen=True)
class Split:
    """Documents of one source."""

    train: list[str]
    held_out: list[str]


def digest(text: str) -> int:
    """Return a stable 64-bit hash of a document, the only source of randomness in the split."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def read_documents(path: Path) -> list[str]:
    """Return the documents of an xz file, which are separated by lines that contain only the end marker."""
    if "prompts" in path.resolve().parts:
        raise ValueError(f"{path}: prompts for measuring must not be used for training")
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        text = lines.read()
    return documents_of(text)


def read_stdlib() -> list[str]:
    """Return the modules of the standard library, without tests and tables."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if STDLIB_SKIP.isdisjoint(inside.parts):
            text = path.read_text(encoding="utf-8", errors="ignore").strip("\n")
            if len(text) > 200:
                documents.append(f"# file: {inside.as_posix()}\n{text}")
    return documents


def clean_gsm8k(text: str) -> str:
    """Remove calculator marks, and format every second problem as a chat, so that the model learns the chat format."""
    text = re.sub(r"<<[^<>]*>>", "", text)
    text = re.sub(r"#### *(\S+)", r"The answer is \1.", text)
    if digest(text) % 2:
        text = text.replace("Question: ", f"{USER}\n", 1).replace("\nAnswer: ", f"\n{ASSISTANT}\n", 1)
    return text


def clean_markdown(text: str) -> str:
    """Remove YAML front matter, HTML comments and anchors."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->|<a id=[^>]*></a>", "", text, flags=re.DOTALL)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


CLEANERS: dict[str, Callable[[str], str]] = {"gsm8k": clean_gsm8k, "cpp": clean_markdown, "rust": clean_markdown}


def parsed(text: str) -> ast.Module | None:
    """Return the syntax tree of Python text; None if it is not valid."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def functions(document: str) -> Iterator[str]:
    """Yield the functions and methods of one module as separate documents, some as answers in a chat."""
    tree = parsed(document)
    if tree is None:
        return
    lines = document.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        length = node.end_lineno - first + 1
        has_doc = ast.get_docstring(node) is not None
        if not 3 + has_doc <= length <= 60 or len(node.body) < 1 + has_doc or node.name.startswith("test"):
            continue
        text = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))
        doc = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
        if 20 < len(doc) < 200 and digest(text) % 8 == 0:
            yield chats.function_request(doc, text)
        elif has_doc or digest(text) % 2:
            yield text


def split(documents: list[str], limit: int) -> Split:
    """Hold out about half a percent of the text in whole documents, chosen by hash."""
    ordered = sorted(set(documents), key=digest)
    total = sum(map(len, ordered))
    held_out: list[str] = []
    train: list[str] = []
    held = kept = 0
    for text in ordered:
        if held < HELD_OUT_SHARE * total and len(text) < max(0.03 * total, 2000):
            held_out.append(text)
            held += len(text)
        elif kept < limit:
            train.append(text)
            kept += len(text)
    return Split(train, held_out)


def lines_of(document: str) -> dict[int, int]:
    """Return hash -> length of every long line, reduced to letters and digits, to find near-duplicates."""
    plain = (re.sub(r"[\W_]+", "", line).lower() for line in document.splitlines())
    return {hash(line): len(line) for line in plain if len(line) >= LONG_LINE}


def without_duplicates(splits: dict[str, Split]) -> dict[str, Split]:
    """Drop training documents that mostly repeat held-out text or a document of an earlier source."""
    seen: set[int] = set()
    for found in splits.values():
        for text in found.held_out:
            seen.update(lines_of(text))
    kept: dict[str, Split] = {}
    for name in sorted(splits, key=lambda name: name not in FIRST):
        train = []
        for text in splits[name].train:
            lines = lines_of(text)
            repeated = sum(length for line, length in lines.items() if line in seen)
            if repeated <= MOST_REPEATED * max(1, sum(lines.values())):
                train.append(text)
                seen.update(lines)
        kept[name] = Split(train, splits[name].held_out)
    return kept


def functions_of(splits: dict[str, Split], names: tuple[str, ...], limit: int) -> Split:
    """Return the functions of several sources as a split; those from held-out files are held out."""
    train: set[str] = set()
    held_out: set[str] = set()
    for name in names:
        share = limit // 4 if name == "sympy" else limit
        size = 0
        for text in splits[name].train:
            if size < share:
                train.update(functions(text))
                size += len(text)
        for text in splits[name].held_out:
            held_out.update(functions(text))
    return Split(sorted(train - held_out, key=digest), sorted(held_out, key=digest))


def load(corpus: Path, megabytes: float) -> dict[str, Split]:
    """Return every source, cleaned, split and without near-duplicates, in the order of `SOURCES`."""
    limit = int(megabytes * 1e6)
    splits: dict[str, Split] = {}
    for source in SOURCES:
        if source.file or source.name == "stdlib":
            documents = read_documents(corpus / source.file) if source.file else read_stdlib()
            clean = CLEANERS.get(source.name, str)
            splits[source.name] = split([clean(text) for text in documents], limit)
    splits = without_duplicates(splits)
    splits["functions"] = functions_of(splits, CODE, limit)
    splits["package_functions"] = functions_of(splits, ("packages",), limit)
    splits["chats"] = split(chats.write(splits["tldr"].train, splits["tales"].train), limit)
    for name in ("functions", "tales", "chats"):
        splits[f"written_{name}"] = Split(*written.texts(name))
    return {source.name: splits[source.name] for source in SOURCES}
