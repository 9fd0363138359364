"""HTTP: an OpenAI-compatible server around one engine, and the demo's page. The only room with asynchronous code.

Nothing is imported here, so that parts of it can be used without the libraries that all of it needs (``outrider[serve]``).
"""
