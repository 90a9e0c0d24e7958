"""Benchmarks: each one command, each writing a record into `results/`."""
