"""``outrider demo``: a page on which plain and speculative decoding race, and everything that stands behind it."""
