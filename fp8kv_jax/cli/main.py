"""Entry point of `fp8kv`: parses, runs a command, turns errors into one line."""

import io
import os
import sys
from collections.abc import Sequence

import jax
import typer

from fp8kv_jax.cli import scales, scales_exchange, scales_rebind
from fp8kv_jax.cli.calibrate import calibrate
from fp8kv_jax.cli.compare import compare
from fp8kv_jax.cli.errors import UserError, print_error
from fp8kv_jax.cli.generate import generate
from fp8kv_jax.cli.replay import replay
from fp8kv_jax.cli.serve import serve
from fp8kv_jax.cli.sweep import sweep

INTERRUPTED = 130
USAGE = 2

app = typer.Typer(
    add_completion=False,
    help="FP8 KV cache for JAX: calibrates its scales online and stays exact.",
    pretty_exceptions_enable=False,
    # Rich's help cuts long flag names to fit 80 columns.
    rich_markup_mode=None,
)


app.command("generate")(generate)
app.command("calibrate")(calibrate)
app.command("replay")(replay)
app.command("sweep")(sweep)
app.command("compare")(compare)
app.command("serve")(serve)
scales.app.command("import")(scales_exchange.import_command)
scales.app.command("export")(scales_exchange.export_command)
scales.app.command("rebind")(scales_rebind.rebind_command)
app.add_typer(scales.app, name="scales")

# The parser's base error. Newer typers carry their own copy of click, so that neither
# package's name for it serves both.
_ParserError: type[Exception] = typer.BadParameter.__mro__[2]

_OUT_OF_MEMORY = (
    "Expected the model and its KV cache to fit the device's memory, but it ran out: "
    "try fewer prompts, a smaller --max-new-tokens, or --dtype bfloat16."
)


def main() -> None:
    """Runs the command line of this process and exits."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may well write what the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="replace")
    code = run(sys.argv[1:])
    if code == INTERRUPTED:
        # A compilation still under way in a thread would hold up a normal exit.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line.

    Returns:
      The exit code: 0, 1 for a closed pipe or a policy that is not met, 2 for an
      error, 130 for an interruption.
    """
    command = typer.main.get_command(app)
    try:
        code = command.main(
            args=list(arguments), prog_name="fp8kv", standalone_mode=False
        )
    except UserError as error:
        print_error(str(error))
        return USAGE
    except _ParserError as error:
        return _report_usage(error)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print_error(_OUT_OF_MEMORY)
        return USAGE
    except SystemExit as error:  # how the parser ends when stdout is closed
        return error.code if isinstance(error.code, int) else 1
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _report_usage(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "fp8kv"
    message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    print_error(f"{message}. See `{path} --help`.")
    return USAGE
