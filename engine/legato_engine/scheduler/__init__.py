"""What runs next, and how two steps overlap: planners, pipeline, tick."""
