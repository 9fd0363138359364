"""``outrider demo``: a web page that runs plain and speculative decoding side by side, and its server."""
