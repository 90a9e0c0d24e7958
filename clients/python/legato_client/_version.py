"""The version of the installed distribution, and of the contract it knows."""

from importlib import metadata

CONTRACT_REVISION = 1  # as the service's own constant; a test compares them


def version() -> str:
    """The distribution's version, or "0+source" when it runs from a plain source tree."""
    try:
        return metadata.version("legato")
    except metadata.PackageNotFoundError:
        return "0+source"
