"""A short text of prose, code and arithmetic, on which methods measure before any generation."""

TEXT = """The ferry left at a quarter past six, when the fog had lifted far enough for the captain to see the second buoy. Two
of the passengers had missed it; they stood on the pier with their bicycles and waved. "We will take the next one," said the
older of the two, and they sat down to wait. The next one was at nine.

def mean(values):
    \"\"\"The arithmetic mean of a list of numbers.\"\"\"
    if not values:
        raise ValueError("mean of an empty list")
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

Question: A box holds 12 pencils. How many pencils are in 5 boxes?
Answer: There are 12 pencils in each box, so 5 boxes hold 5 * 12 = 60 pencils.
"""
