"""Lets the tests run from any folder: the trainer is a plain folder, not an installed package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
