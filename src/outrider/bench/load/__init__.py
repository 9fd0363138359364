"""Load tests of servers over HTTP: arrivals, and latencies as seen by clients."""
