"""Search for the fastest plan for given traffic, by successive halving over measured runs."""
