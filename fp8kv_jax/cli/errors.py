"""What a user sees when something is wrong: one line on stderr."""

import contextlib
import sys
import warnings
from collections.abc import Generator


class UserError(Exception):
    """Something only the user can mend; shown as one line, without a traceback."""


def print_error(message: str) -> None:
    print(f"fp8kv: error: {_one_line(message)}", file=sys.stderr)


def print_warning(message: str) -> None:
    print(f"fp8kv: warning: {_one_line(message)}", file=sys.stderr)


@contextlib.contextmanager
def checking_input() -> Generator[None]:
    """Turns a ValueError into a UserError, and warnings into lines on stderr.

    For code that checks what the user gave, and nothing else: elsewhere a ValueError
    is a bug and keeps its traceback.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except ValueError as error:
            raise UserError(str(error)) from error
    for warning in caught:
        print_warning(str(warning.message))


def _one_line(message: str) -> str:
    return " ".join(message.split())
