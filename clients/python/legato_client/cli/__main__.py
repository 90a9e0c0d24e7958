"""`python -m legato_client.cli` is the `legato` command."""

import sys

from legato_client.cli.main import main

sys.exit(main())
