"""The benchmark harness: `rlhf-scan bench`, or `python -m benchmarks` in the repository."""
