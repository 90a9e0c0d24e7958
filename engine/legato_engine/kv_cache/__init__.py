"""Pages, rows and shared prefixes: who holds what, and who waits."""
