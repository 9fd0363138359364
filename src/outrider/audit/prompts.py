"""Short prompts of the audit. Each repeats a phrase, so that text-based methods draft too."""

from __future__ import annotations

PROMPTS = (
    "one two three, one two three, one two",
    "def area(w, h):\n    return w * h\n\ndef area(",
    "The rain fell on the roof, and the rain fell on the",
    '{"id": 1, "name": "Ann"}, {"id": 2, "name": "',
    "for i in range(5):\n    print(i)\nfor i in range(",
    "She opened the door. He opened the door. They opened the",
)
