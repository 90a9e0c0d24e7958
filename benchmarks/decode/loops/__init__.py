"""Decode loops beside a launch for every step, and the sequences that their tests run, too."""

from benchmarks.decode.loops.arrivals import randomly
from benchmarks.decode.loops.decodes import Decodes, picture, question, recorded, skilled, values_of
from benchmarks.decode.loops.run import main
from benchmarks.decode.loops.steps import lists_of, steps_of

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
