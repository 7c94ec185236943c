"""The README's code runs as it stands."""

import pathlib
import re

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_the_loop_in_the_readme_freezes(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(code, str(README), "exec"), {})
    assert capsys.readouterr().out == "frozen: True, tokens: 48\n"
