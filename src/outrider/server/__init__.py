"""HTTP: the only async room. Knows no method's name and nothing of what is inside a round but what the engine shows."""
