"""Benchmarks: each one command, each writing raw JSON and a Markdown record into `results/`."""
