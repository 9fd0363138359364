"""Plans for other engines: the same models and the same way of drafting, in their words, files and commands."""
