"""Scheduling: planners, the two-slot pipeline and the step that drives them."""
