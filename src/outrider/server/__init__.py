"""An OpenAI-compatible server around one engine: the only room with asynchronous code.

Nothing is imported here, so that parts of it can be used without the libraries that all of it needs (``outrider[serve]``).
"""
