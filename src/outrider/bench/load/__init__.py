"""Load on a server: requests as they arrive, latencies as clients see them. Knows HTTP, and nothing of any engine."""
