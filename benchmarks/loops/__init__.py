"""Decode loops beside a launch for every step, and the sequences that their tests run, too."""

from benchmarks.loops.arrivals import randomly
from benchmarks.loops.decodes import Decodes, recorded, values_of
from benchmarks.loops.requests import picture, question, skilled
from benchmarks.loops.run import main
from benchmarks.loops.steps import lists_of, steps_of

__all__ = [
    "Decodes",
    "lists_of",
    "main",
    "picture",
    "question",
    "randomly",
    "recorded",
    "skilled",
    "steps_of",
    "values_of",
]
