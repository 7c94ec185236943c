"""Where prompts come from: arguments, files and stdin."""

import sys
from collections.abc import Sequence
from pathlib import Path

from fp8kv_jax.cli.errors import UserError

STDIN = "-"


def read_prompts(arguments: Sequence[str], files: Sequence[Path]) -> list[str]:
    """Reads prompts: the arguments first, then one from each file.

    "-" stands for stdin, which is also read when nothing is given and stdin is not a
    terminal. One newline at the end of a file belongs to the file, not to the prompt.

    Raises:
      UserError: if there is no prompt, or one is empty, unreadable or not UTF-8.
    """
    sources = [*arguments, *(str(f) for f in files)]
    if sources.count(STDIN) > 1:
        raise UserError('Expected "-" (stdin) once, got it more often.')
    prompts = [_read_stdin() if a == STDIN else a for a in arguments]
    prompts += [_read_stdin() if str(f) == STDIN else _read_file(f) for f in files]
    if not sources:
        if sys.stdin is None or sys.stdin.isatty():
            raise UserError(
                "Expected a prompt, got none: give it as an argument, with "
                "--prompt-file, or on stdin."
            )
        prompts = [_read_stdin()]
    for index, prompt in enumerate(prompts, 1):
        _check(prompt, index)
    return prompts


def _read_stdin() -> str:
    return _decode(sys.stdin.buffer.read(), "stdin")


def _read_file(path: Path) -> str:
    try:
        return _decode(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(
            f"Expected --prompt-file to name a readable file, got {path}: "
            f"{error.strerror}."
        ) from error


def _decode(data: bytes, source: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"Expected UTF-8 text from {source}, got byte "
            f"0x{data[error.start]:02x} at offset {error.start}."
        ) from error
    return text.removesuffix("\n").removesuffix("\r")


def _check(prompt: str, index: int) -> None:
    if not prompt:
        raise UserError(
            f"Expected prompt {index} to hold text, got an empty one: there is nothing "
            "to continue."
        )
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"Expected prompt {index} to be UTF-8 text.") from error
