"""Benchmarks of rlhf_scan; results of runs are committed under results/."""
