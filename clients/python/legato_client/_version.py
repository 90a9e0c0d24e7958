"""The version of the installed distribution."""

from importlib import metadata


def version() -> str:
    """The distribution's version, or "0+source" when it runs from a plain source tree."""
    try:
        return metadata.version("legato")
    except metadata.PackageNotFoundError:
        return "0+source"
