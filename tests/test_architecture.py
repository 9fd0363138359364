"""Package boundaries, checked in the source: import order, names of methods, and sizes of files and functions."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import outrider
from outrider.registry import PROPOSERS

ROOT = Path(outrider.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
REPOSITORY = Path(__file__).parents[1]
SWEEP = [REPOSITORY / "bench" / "sweep.py", *sorted((REPOSITORY / "bench" / "architectures").glob("*.py"))]

# Imports permitted to each package. Packages are folders of src/outrider, or single modules.
BELOW = {
    "errors": set(),
    "lazy": set(),
    "options": {"errors", "files"},
    "sampling_params": {"errors", "options"},
    "types": {"errors", "sampling_params"},
    "method_text": {"errors"},
    "chat": {"errors", "options"},
    "disk_cache": {"errors", "files"},
    "progress": {"errors"},
    "files": {"errors"},
    "hub": {"errors", "files", "hub_errors", "memory", "progress", "weight_files"},
    "hub_errors": {"errors", "files"},
    "memory": {"errors"},
    "weight_files": {"errors", "files"},
    "native": {"errors", "disk_cache", "memory", "progress"},
    "sampling": {"types", "native"},
    "verifiers": {"types", "native", "sampling"},
    "runner": {
        "errors",
        "options",
        "lazy",
        "types",
        "disk_cache",
        "native",
        "progress",
        "memory",
        "weight_files",
        "files",
        "hub",
    },
    "heads": {"errors", "types", "runner", "files", "weight_files", "hub"},
    "proposers": {"errors", "options", "types", "weight_files", "hub", "method_text", "sampling", "runner", "heads"},
    "registry": {"errors", "verifiers", "proposers"},
    "tune": {"types", "runner"},
    "family": set(),
    "engine": {
        "chat",
        "errors",
        "files",
        "heads",
        "hub",
        "options",
        "types",
        "method_text",
        "sampling",
        "verifiers",
        "memory",
        "weight_files",
        "runner",
        "proposers",
        "registry",
        "tune",
        "family",
    },
    "export": {
        "errors",
        "types",
        "method_text",
        "disk_cache",
        "files",
        "hub",
        "sampling",
        "runner",
        "heads",
        "proposers",
        "registry",
        "family",
        "engine",
    },
    "train": {
        "chat",
        "errors",
        "options",
        "progress",
        "types",
        "files",
        "memory",
        "weight_files",
        "sampling",
        "runner",
        "heads",
        "proposers",
        "family",
    },
}
TOP = {
    "bench",
    "audit",
    "doctor",
    "search",
    "server",
    "cli",
    "__init__",
    "__main__",
}  # may import everything below, and each other
METHOD_BLIND = ("engine", "runner", "verifiers", "server", "tune", "search")
WRAPPER = "GuardedProposer"  # the engine's own, independent of the method
COMMON_WORDS = {"draft", "plain"}  # also ordinary words: only comparisons with them count
MAX_FILE, MAX_FUNCTION = 500, 60


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_of(path: Path) -> str:
    return ".".join(["outrider", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """Return the modules of the package named in a file: imported anywhere, also in functions and for type checkers, or as
    ``"outrider.module:attribute"`` in a registry.
    """
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(re.findall(r"^(outrider(?:\.\w+)+)(?::\w+)?$", node.value))
    return frozenset((found & MODULES.keys()) - {module_of(path)})


def circle_through(module: str) -> list[str] | None:
    """Return a cycle of imports through ``module``, or None."""
    ways, seen = [[module]], {module}
    while ways:
        way = ways.pop()
        for other in imported_modules(MODULES[way[-1]]):
            if other == module:
                return [*way, module]
            if other not in seen:
                seen.add(other)
                ways.append([*way, other])
    return None


def test_no_modules_import_each_other() -> None:
    circles = [circle for module in MODULES if (circle := circle_through(module))]
    assert not circles, " -> ".join(min(circles, key=len))


def test_imports_go_one_way():
    rooms = {room_of(path) for path in FILES}
    assert rooms == BELOW.keys() | TOP, "docs/structure.md's order of imports lacks a package, or has one too many"
    for path in FILES:
        room = room_of(path)
        if room not in TOP:
            forbidden = {room_of(MODULES[module]) for module in imported_modules(path)} - BELOW[room] - {room}
            assert not forbidden, f"{path.relative_to(ROOT)} imports {forbidden}"


@pytest.mark.parametrize("room", METHOD_BLIND)
def test_no_method_is_named_outside_its_file(room):
    names = set(PROPOSERS)
    for path in FILES:
        if room_of(path) != room:
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names - COMMON_WORDS:
                raise AssertionError(f"{path.name}:{node.lineno} names the method {node.value!r}")
            if isinstance(node, (ast.Name, ast.Attribute)):
                name = node.id if isinstance(node, ast.Name) else node.attr
                assert not re.fullmatch(r"[A-Z]\w+Proposer", name) or name == WRAPPER, f"{path.name}: {name}"
            if isinstance(node, ast.Compare):
                compared = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str)}
                assert not compared & names, f"{path.name}:{node.lineno} compares with a method's name"


def test_export_does_not_decide_by_names_of_methods():
    """Other engines' names of methods may equal ours. They may occur as values, but not in conditions."""
    names = set(PROPOSERS)
    for path in FILES:
        if room_of(path) != "export":
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Compare):
                compared = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str)}
                assert not compared & names, f"{path.name}:{node.lineno} compares with a method's name"
            if isinstance(node, ast.ImportFrom):
                assert not re.fullmatch(r"outrider\.proposers\.(?!base|method|portable)\w+", node.module or ""), path


def test_verifiers_and_types_are_independent_of_models_and_temperature():
    for path in FILES:
        if room_of(path) == "verifiers":
            names = {node.id for node in ast.walk(tree_of(path)) if isinstance(node, ast.Name)}
            attributes = {node.attr for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
            assert not (names | attributes) & {"temperature", "SamplingParams", "transformers", "past_key_values"}, path


def test_the_package_does_not_import_the_repository():
    """Its folders are not installed with the package."""
    outside = {"bench", "tests", "recipes", *(path.stem for path in (REPOSITORY / "bench").iterdir())}
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & outside, path


def test_files_and_functions_stay_small():
    for path in [*FILES, *SWEEP]:
        assert len(path.read_text().splitlines()) <= MAX_FILE, path
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= MAX_FUNCTION, f"{path}: {node.name} has {length} lines"


def test_file_names_have_no_version_suffixes():
    odd = [path.name for path in FILES if re.search(r"_(v\d+|new|old|legacy|common|misc|utils?\d*|helpers?)\.py$", path.name)]
    assert not odd


def test_no_model_code_is_vendored():
    assert not [path for path in FILES if path.name.startswith("modeling_")]


def test_ambiguous_names_of_distributions_are_not_used():
    for path in FILES:
        if room_of(path) in {"sampling", "verifiers", "engine", "proposers"}:
            arguments = {node.arg for node in ast.walk(tree_of(path)) if isinstance(node, ast.arg)}
            assert not arguments & {"p", "q"}, f"{path}: write target_probs, draft_probs"


def test_exported_names_are_exactly_the_public_ones():
    listed = outrider.__all__
    assert listed == sorted(listed, key=lambda name: (name != name.upper(), not name[0].isupper(), name))
    homes = {name: module for module, names in outrider._MODULES.items() for name in names}
    assert set(listed) == set(homes)
    for name in listed:
        assert getattr(outrider, name).__module__ == homes[name]
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = outrider.nonsense


def test_every_package_exports_the_names_it_lists():
    for path in FILES:
        if path.name != "__init__.py" or path.parent == ROOT:
            continue
        module = __import__(".".join(["outrider", *path.parent.relative_to(ROOT).parts]), fromlist=["_"])
        for name in getattr(module, "__all__", []):
            assert hasattr(module, name), f"{module.__name__} lists {name}"
