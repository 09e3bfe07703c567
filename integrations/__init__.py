"""Doors into trainers: each takes an `rlhf_scan.Engine` and knows nothing else of where the work is done. Import the one you need."""
