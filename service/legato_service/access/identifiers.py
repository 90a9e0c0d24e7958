"""The form of the names that callers and credentials give."""

IDENTIFIER = "[A-Za-z0-9._:-]{1,64}"
"""Of tenants and request ids, as a regular expression."""
