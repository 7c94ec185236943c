"""What tests of the command line share."""

import json

import pytest

from fp8kv_jax.cli.main import run


@pytest.fixture
def command_line(capsys):
    """Runs a command line in this process: exit code, stdout and stderr."""

    def run_it(*arguments):
        code = run([str(x) for x in arguments])
        return code, *capsys.readouterr()

    return run_it


@pytest.fixture
def cli_json(cli):
    """Runs a module's `cli` with --json, which must succeed, and reads its object."""

    def run_json(*arguments):
        code, out, err = cli(*arguments, "--json")
        assert code == 0, err
        return json.loads(out, parse_constant=pytest.fail)

    return run_json
