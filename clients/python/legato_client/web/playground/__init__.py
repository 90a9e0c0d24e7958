"""A page to try a Legato server with, and the small process behind it."""
