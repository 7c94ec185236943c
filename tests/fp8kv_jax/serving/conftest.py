"""Lets these tests use the tiny model and the oracle of the folder above."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
