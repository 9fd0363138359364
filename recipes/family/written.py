"""Short tales, Python functions and conversations written for this family, as templates with alternatives.

The corpus has few texts that are simple enough for a model of this size to learn to write well (compare TinyStories: Eldan and
Li 2023, arXiv 2305.07759). In a template, `«small|little»` stands for one of its alternatives, `«name=Anna|Tom»` also remembers
which, and a later `«name»` repeats it.
"""

from __future__ import annotations

import ast
import random
import re
from pathlib import Path

from .chats import Turn, document, function_request
from .config import documents_of

FOLDER = Path(__file__).with_name("written")
EXPANSIONS = 12  # training texts of one template
HELD_OUT = 64  # every so many templates, one is held out
SLOT = re.compile(r"«([^«»]*)»")


def templates(name: str) -> list[str]:
    """Return the templates of `written/NAME.txt`, which are separated by lines that contain only the end marker."""
    return documents_of((FOLDER / f"{name}.txt").read_text(encoding="utf-8"))


def expand(template: str, rng: random.Random) -> str:
    """Return one text of a template. Raises ``ValueError`` if a slot is used before it is defined, or defined twice."""
    chosen: dict[str, str] = {}

    def fill(match: re.Match[str]) -> str:
        name, defines, options = match[1].partition("=")
        if defines and name.isidentifier():
            if name in chosen:
                raise ValueError(f"slot {name!r} is defined twice: {template[:60]!r}")
            return chosen.setdefault(name, rng.choice(options.split("|")))
        if "|" in match[1]:
            return rng.choice(str(match[1]).split("|"))
        if match[1] not in chosen:
            raise ValueError(f"slot {match[1]!r} is not defined before it is used: {template[:60]!r}")
        return chosen[match[1]]

    return SLOT.sub(fill, template)


def conversation(text: str) -> str:
    """Return a conversation, written as lines ``USER:`` and ``ASSISTANT:`` before each turn, in the chat template."""
    _, *parts = re.split(r"^(?:USER|ASSISTANT):\n", text, flags=re.MULTILINE)
    turns: list[Turn] = [(asked.strip("\n"), said.strip("\n")) for asked, said in zip(parts[::2], parts[1::2], strict=True)]
    return document(turns)


def request(text: str) -> str:
    """Return a documented function as the answer to a request in the chat template, anything else unchanged."""
    last = ast.parse(text).body[-1]
    doc = ast.get_docstring(last) if isinstance(last, ast.FunctionDef) else None
    return function_request(doc.splitlines()[0], text) if doc else text


def texts(name: str) -> tuple[list[str], list[str]]:
    """Return the training and held-out texts of `tales`, `functions` or `chats`. One function in eight answers a request."""
    train: list[str] = []
    held_out: list[str] = []
    for index, template in enumerate(templates(name)):
        rng = random.Random(f"{name} {template}")
        alternatives = list(dict.fromkeys(expand(template, rng) for _ in range(EXPANSIONS)))
        if name == "chats":
            alternatives = [conversation(text) for text in alternatives]
        elif name == "functions":
            alternatives = [request(text) if rng.random() < 1 / 8 else text for text in alternatives]
        if index % HELD_OUT:
            train += alternatives
        else:
            held_out.append(alternatives[0])
    random.Random(name).shuffle(train)
    return train, held_out
