"""Reads a JSON file of a model directory."""

import json
from pathlib import Path
from typing import Any

from models.loading.errors import ModelFileError


def read_json(path: Path) -> Any:
    """Reads one file; a missing or malformed one is a ModelFileError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFileError(f"{path.parent.name}: no {path.name}.") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ModelFileError(
            f"{path.parent.name}: {path.name} is not valid JSON ({error})."
        ) from None


def read_optional_object(path: Path) -> dict[str, Any]:
    """Reads one file that may be absent; `{}` then. It must hold a JSON object."""
    if not path.exists():
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise ModelFileError(f"{path.parent.name}: {path.name} is not a JSON object.")
    return value
