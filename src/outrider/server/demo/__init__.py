"""``outrider demo``: a page on which plain and speculative decoding race, and its server."""
