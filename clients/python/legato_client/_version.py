"""The versions of the distribution and of the contract."""

from importlib import metadata

CONTRACT_REVISION = 1  # equal to the service's own; a test compares them


def version() -> str:
    """Return "0+source" in a plain source tree."""
    try:
        return metadata.version("legato")
    except metadata.PackageNotFoundError:
        return "0+source"
