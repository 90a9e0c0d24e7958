"""The `legato` command."""

from legato_client.cli.main import main

__all__ = ["main"]
