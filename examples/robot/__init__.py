"""A robot's camera: a clip with known truth, played through a session in real time and scored.

`python -m examples.robot --help`, and README.md beside this file.
"""
