"""Export plans to other engines: the same models and drafting method as their files and commands."""
