"""Data behind HTTP: W5, faults, restarts, caches, the Hub and videos. `slow_server` is the store."""
