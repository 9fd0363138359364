"""Engine loop, scheduler, statistics and the ``LLM`` facade. Independent of drafting methods."""
