"""Where notes go while text is under way; processes, since streams are what matters."""

import subprocess
import sys

import pytest

CODE = """
from fp8kv_jax.cli.screen import Screen
with Screen(lambda: "") as screen:
    screen.write("half of a")
    screen.note("note")
    screen.write(" line\\n")
    screen.note("last")
"""


@pytest.mark.parametrize(
    ("stderr", "want"),
    [
        (subprocess.STDOUT, "half of a\nnote\n line\nlast\n"),
        (subprocess.PIPE, "half of a line\n"),
    ],
)
def test_a_note_begins_a_line_where_both_streams_are_one(stderr, want):
    run = subprocess.run(
        [sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=stderr, text=True
    )
    assert run.stdout == want
    assert run.stderr in (None, "note\nlast\n")
