"""Samples of the model card: continuations of original prompts, and the share that parses as Python.

The signatures and openings were written for this file; none is from a benchmark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from .config import SEED
from .corpus import parsed

ENGLISH = (
    "The old house at the end of the road",
    "It was late in the evening when the ship",
    "She opened the letter and",
    "My father used to say that",
    "In the middle of the forest there was",
    "The captain looked at the sea and",
    "There are three reasons why a man",
    "On the following morning we",
    "The children ran into the garden, and",
    "To install a package, use the command",
)

_SIGNATURES = """
def add(first: int, second: int) -> int: | Return the sum of two integers.
def is_even(number: int) -> bool: | Return True if the number is even.
def largest(values: list[int]) -> int: | Return the largest of the values.
def reverse_words(sentence: str) -> str: | Return the sentence with its words in reverse order.
def count_lines(path: str) -> int: | Count the lines of a text file.
def factorial(number: int) -> int: | Return the factorial of a number.
def fibonacci(count: int) -> list[int]: | Return the first Fibonacci numbers.
def is_palindrome(text: str) -> bool: | Check whether a text reads the same backwards.
def mean(values: list[float]) -> float: | Return the arithmetic mean of the values.
def median(values: list[float]) -> float: | Return the median of the values.
def flatten(lists): | Flatten a list of lists into one list.
def unique(items): | Return the items without duplicates, in their first order.
def gcd(first: int, second: int) -> int: | Return the greatest common divisor.
def is_prime(number: int) -> bool: | Return True if the number is a prime.
def primes_up_to(limit: int) -> list[int]: | List all primes up to a limit.
def binary_search(values: list[int], wanted: int) -> int: | Return the index of the wanted value in a sorted list, or -1.
def bubble_sort(values: list[int]) -> list[int]: | Sort a list of integers in ascending order.
def merge(left: list[int], right: list[int]) -> list[int]: | Merge two sorted lists into one sorted list.
def count_vowels(text: str) -> int: | Count the vowels in a text.
def to_title(text: str) -> str: | Capitalise the first letter of each word.
def word_counts(text: str) -> dict[str, int]: | Count how often each word occurs.
def invert(mapping: dict) -> dict: | Swap the keys and the values of a mapping.
def transpose(matrix: list[list[float]]) -> list[list[float]]: | Transpose a matrix.
def dot(left: list[float], right: list[float]) -> float: | Return the dot product of two vectors.
def matrix_product(left, right): | Multiply two matrices given as lists of rows.
def power(base: float, exponent: int) -> float: | Raise a base to an integer exponent.
def digits(number: int) -> list[int]: | Return the decimal digits of a number.
def digit_sum(number: int) -> int: | Return the sum of the decimal digits of a number.
def to_binary(number: int) -> str: | Convert a number to a binary string.
def from_binary(text: str) -> int: | Convert a binary string to a number.
def clamp(value: float, low: float, high: float) -> float: | Limit a value to an interval.
def distance(first: tuple[float, float], second: tuple[float, float]) -> float: | Return the distance of two points.
def celsius_to_fahrenheit(degrees: float) -> float: | Convert degrees Celsius to degrees Fahrenheit.
def read_json(path): | Read a JSON file and return its content.
def write_lines(path, lines): | Write lines to a file.
def depth(tree) -> int: | Return the depth of a binary tree.
def bfs(graph: dict, start: str) -> list[str]: | Visit a graph in breadth first order.
def dfs(graph: dict, start: str) -> set[str]: | Return all nodes reachable from a start node.
def shortest_path(graph, start, end): | Return the shortest path between two nodes.
def neighbors(graph, node): | Return the neighbors of a node.
def remove_spaces(text: str) -> str: | Remove all spaces from a text.
def rotate(items: list, count: int) -> list: | Rotate a list to the left.
def chunks(items: list, size: int): | Yield successive chunks of a list.
def cumulative_sum(values: list[int]) -> list[int]: | Return the running totals of the values.
def hamming_distance(first: str, second: str) -> int: | Count the positions at which two strings differ.
def caesar_cipher(text: str, shift: int) -> str: | Encrypt a text by shifting its letters.
def area_of_circle(radius: float) -> float: | Return the area of a circle.
def simple_interest(principal: float, rate: float, years: float) -> float: | Return the interest after some years.
def is_leap_year(year: int) -> bool: | Return True if the year is a leap year.
def roman_to_int(text: str) -> int: | Convert a Roman numeral to an integer.
"""
SIGNATURES = tuple('{}\n    """{}"""\n'.format(*line.split(" | ")) for line in _SIGNATURES.strip().splitlines())


@torch.no_grad()
def continuations(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    new_tokens: int,
    temperature: float,
    top_p: float = 1.0,
) -> list[list[int]]:
    """Generate each prompt's continuation up to and including the first end token, all prompts in one batch."""
    torch.manual_seed(SEED)
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": top_p} if temperature else {"do_sample": False}
    end = tokenizer.eos_token_id
    out = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=new_tokens, **how)
    written = out[:, batch["input_ids"].shape[1] :].tolist()
    return [ids[: ids.index(end) + 1] if end in ids else ids for ids in written]


def text_of(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    """Decode a continuation; the end token becomes a newline."""
    ended = ids[-1:] == [tokenizer.eos_token_id]
    return str(tokenizer.decode(ids[:-1])) + "\n" if ended else str(tokenizer.decode(ids))


def function_body(continuation: str) -> str:
    """Return the continuation up to the first line that leaves the function.

    Without such a line, the token limit cut the text: the last line is dropped, and with it the beginning of an empty block
    (``if done:``). Open brackets and strings are kept, because most of them would never be closed.
    """
    lines = continuation.split("\n")
    for index, line in enumerate(lines):
        if line and not line[0].isspace():
            return "\n".join(lines[:index])
    unfinished = lines.pop()
    while unfinished and lines and (not lines[-1].strip() or lines[-1].rstrip().endswith(":")):
        lines.pop()
    return "".join(f"{line}\n" for line in lines)


def parses(prompt: str, continuation: str) -> bool:
    """Return whether prompt and `function_body` are valid Python with a non-empty body."""
    body = function_body(continuation)
    return bool(body.strip()) and parsed(prompt + body) is not None
