"""Short question-and-answer documents in the chat template.

Commands come from tldr, stories from the shortest tales; greetings, sums and everyday facts are defined here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from .config import ASSISTANT, END, SEED, USER

Turn = tuple[str, str]  # question, answer

GREETINGS = ("Hello", "Hello!", "Hi", "Hi!", "Hey", "Good morning", "Good evening!", "Hello there", "Hi there!", "Greetings")
WELCOMES = (
    "Hello! How can I help you?",
    "Hi! What would you like to do today?",
    "Hello! Ask me for a story, a sum or a short Python function.",
    "Good to see you. What can I do for you?",
)
THANKS = ("Thanks", "Thank you!", "Thank you very much", "Thanks a lot!", "Great, thanks", "That helps, thank you.")
NO_TROUBLE = ("You are welcome!", "You are welcome. Is there anything else?", "My pleasure.", "Glad to help!")
FAREWELLS = ("Bye", "Goodbye!", "See you later", "Good night", "Bye, see you tomorrow")
PARTINGS = ("Goodbye! Have a nice day.", "See you soon!", "Goodbye, and take care.")
ABOUT_ITSELF: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
        "I am the small language model that comes with Outrider. I learned from tales and Python code, and I know very little.",
    ),
    (
        ("What can you do?", "How can you help me?", "What should I ask you?"),
        "I can tell a short story, solve a small sum, name a shell command or write a short Python function.",
    ),
    (("How are you?", "How are you today?", "How do you do?", "Are you well?"), "I am well, thank you. How can I help you?"),
    (("Are you a human?", "Are you a person?", "Are you real?"), "No, I am a small computer program that writes text."),
    (("Do you know everything?", "Are you clever?", "How large are you?"), "No. I am a very small model and I am often wrong."),
)
CAPITALS = (
    "France Paris|Germany Berlin|Italy Rome|Spain Madrid|England London|Ireland Dublin|Scotland Edinburgh|Portugal Lisbon|"
    "Austria Vienna|Poland Warsaw|Greece Athens|Norway Oslo|Sweden Stockholm|Denmark Copenhagen|Finland Helsinki|Russia Moscow|"
    "Hungary Budapest|Belgium Brussels|Egypt Cairo|Kenya Nairobi|Japan Tokyo|China Beijing|India Delhi|Turkey Ankara|"
    "Canada Ottawa|Mexico Mexico City|Cuba Havana|Peru Lima|Chile Santiago|Argentina Buenos Aires|Australia Canberra"
)
OPPOSITES = (
    "hot cold|big small|old young|up down|left right|open closed|early late|fast slow|high low|light dark|happy sad|rich poor|"
    "strong weak|wet dry|full empty|good bad|true false|first last|long short|near far|hard soft|clean dirty|"
    "day night|push pull"
)
COLOURS = "sky blue|grass green|snow white|coal black|blood red|sun yellow|sea blue|milk white|lemon yellow|night black"
SOUNDS = "dog barks|cat meows|cow moos|duck quacks|lion roars|sheep bleats|horse neighs|owl hoots|bee buzzes|frog croaks"
BUILTINS = (
    "len returns the number of items in a container|sum adds the items of an iterable|max returns the largest item|"
    "min returns the smallest item|sorted returns a sorted list of the items|range makes a sequence of integers|"
    "print writes values to the screen|open opens a file and returns a file object|zip pairs the items of several iterables|"
    "enumerate yields each item with its index|abs returns the absolute value of a number|reversed iterates in reverse order|"
    "input reads a line from the user|isinstance checks whether an object has a type|any is true if some item is true|"
    "all is true if every item is true|round rounds a number|map applies a function to every item|"
    "filter keeps the items for which a function is true|str turns a value into a string|int turns a value into an integer"
)
MOST_TURNS = 3
COMMANDS, SUMS, SMALL_TALK, FACT_COPIES = 9000, 6000, 6000, 20
STORY_CHARACTERS = 1400


def _pairs(table: str) -> list[list[str]]:
    return [entry.split(" ", 1) for entry in table.split("|")]


def facts() -> list[Turn]:
    """Return everyday questions with one short answer each."""
    found: list[Turn] = []
    for country, city in _pairs(CAPITALS):
        found.append((f"What is the capital of {country}?", f"The capital of {country} is {city}."))
        found.append((f"Which country has the capital {city}?", f"{city} is the capital of {country}."))
    for left, right in _pairs(OPPOSITES):
        for one, other in ((left, right), (right, left)):
            found.append((f"What is the opposite of {one}?", f"The opposite of {one} is {other}."))
    found += [(f"What colour is the {thing}?", f"The {thing} is {colour}.") for thing, colour in _pairs(COLOURS)]
    found += [(f"What does a {animal} do?", f"A {animal} {sound}.") for animal, sound in _pairs(SOUNDS)]
    for name, what in _pairs(BUILTINS):
        found.append((f"What does {name} do in Python?", f"`{name}` {what}."))
    return found


def sum_turn(rng: random.Random) -> Turn:
    """Return a question about two small numbers."""
    first, second = rng.randint(0, 20), rng.randint(0, 12)
    kind = rng.choice("+-*")
    value = {"+": first + second, "-": first - second, "*": first * second}[kind]
    words = {"+": "plus", "-": "minus", "*": "times"}[kind]
    question = rng.choice(
        (f"What is {first} {kind} {second}?", f"{first} {kind} {second} = ?", f"How much is {first} {words} {second}?")
    )
    return question, f"{first} {kind} {second} = {value}."


def small_talk(rng: random.Random) -> Turn:
    """Return a greeting, thanks, a farewell, or a question about the model."""
    kind = rng.randrange(5)
    if kind < 3:
        asked, answered = ((GREETINGS, WELCOMES), (THANKS, NO_TROUBLE), (FAREWELLS, PARTINGS))[kind]
        return rng.choice(asked), rng.choice(answered)
    questions, answer = rng.choice(ABOUT_ITSELF)
    return rng.choice(questions), answer


def commands(pages: list[str]) -> Iterator[Turn]:
    """Yield a "How do I ...?" question for each example of the tldr pages."""
    for page in pages:
        for what, command in re.findall(r"^- (.+):\n\n`(.+)`$", page, flags=re.MULTILINE):
            plain = re.sub(r"[\[\]{}]", "", what)
            command = re.sub(r"\[(-\w)\|(--[\w-]+)\]", r"\1", command).replace("{{", "").replace("}}", "")
            if "`" not in command and len(plain) < 90 and "(" not in plain:
                yield f"How do I {plain[0].lower()}{plain[1:]}?", f"Use this command:\n`{command}`"


def stories(tales: list[str]) -> Iterator[Turn]:
    """Yield requests for a story, answered by short tales."""
    for tale in tales:
        title, _, text = tale.partition("\n\n")
        if 200 < len(text) < STORY_CHARACTERS and len(title) < 60 and title.upper() == title:
            yield f"Tell me a story about {title.lower()}.", text
            yield "Tell me a story.", f"{title.title()}\n\n{text}"


def document(turns: list[Turn]) -> str:
    """Format a conversation with the tokenizer's chat template."""
    return f"{END}\n".join(f"{USER}\n{asked}\n{ASSISTANT}\n{answered}" for asked, answered in turns)


def function_request(doc: str, text: str) -> str:
    """Return a function as the answer to a request for what its docstring says."""
    return document([(f"Write a Python function: {doc}", text)])


def write(tldr: list[str], tales: list[str]) -> list[str]:
    """Return all conversations: each command, story and fact at least once, mixed with small talk and sums."""
    rng = random.Random(SEED)
    asked = [*rng.sample(found := list(commands(tldr)), min(COMMANDS, len(found))), *stories(tales), *stories(tales)]
    asked += facts() * FACT_COPIES + [sum_turn(rng) for _ in range(SUMS)] + [small_talk(rng) for _ in range(SMALL_TALK)]
    rng.shuffle(asked)
    documents = []
    while asked:
        count = min(len(asked), rng.randint(1, MOST_TURNS))
        documents.append(document([asked.pop() for _ in range(count)]))
    return documents
