"""Builds a tokenizer from a Hugging Face directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from models.loading.errors import ModelFileError
from models.loading.json_file import read_json, read_optional_object
from models.tokenizer import PieceKind, Tokenizer

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def tokenizer_from_directory(path: Path) -> Tokenizer:
    """Builds the tokenizer of tokenizer.json and of the files beside it.

    Raises:
      ModelFileError: if tokenizer.json is missing or of an unknown kind.
    """
    description = _read_description(path / "tokenizer.json")
    settings = read_optional_object(path / "tokenizer_config.json")
    config = read_optional_object(path / "config.json")
    generation = read_optional_object(path / "generation_config.json")
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(
            f"{path.name}: tokenizer.json cannot be used ({error})."
        ) from None
    backend.no_padding()
    backend.no_truncation()
    named = _named_tokens(settings)
    bos_id = _bos_id(backend, named, config)
    kind, strip_prefix = _piece_kind(description, path)
    return Tokenizer(
        backend=backend,
        piece_kind=kind,
        strip_prefix=strip_prefix,
        bos_id=bos_id,
        eos_ids=_eos_ids(backend, named, config, generation),
        add_bos=_adds_bos(backend, settings, bos_id),
        chat_template=_chat_template(path, settings),
        named_tokens=named,
    )


def _read_description(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ModelFileError(f"{path.parent.name}: no tokenizer (no tokenizer.json).")
    value = read_json(path)
    if not isinstance(value, dict):
        raise ModelFileError(f"{path.parent.name}: tokenizer.json is not an object.")
    return value


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for name in _TOKEN_NAMES:
        token = settings.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            named[name] = content
    return named


def _bos_id(
    backend: tokenizers.Tokenizer, named: Mapping[str, str], config: Mapping[str, Any]
) -> int | None:
    if "bos_token" in named:
        return backend.token_to_id(named["bos_token"])
    bos_id = config.get("bos_token_id")
    # Some configs name an id beside a tokenizer that has no such token.
    known = bos_id is not None and backend.id_to_token(bos_id) is not None
    return bos_id if known else None


def _eos_ids(
    backend: tokenizers.Tokenizer,
    named: Mapping[str, str],
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
) -> frozenset[int]:
    ids: set[int] = set()
    for source in (config, generation):
        value = source.get("eos_token_id")
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
    if "eos_token" in named:
        eos_id = backend.token_to_id(named["eos_token"])
        ids.update([] if eos_id is None else [eos_id])
    return frozenset(ids)


def _adds_bos(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], bos_id: int | None
) -> bool:
    if bos_id is None:
        return False
    if isinstance(settings.get("add_bos_token"), bool):
        return settings["add_bos_token"]
    # Otherwise what the file's own post-processor puts before an empty text.
    return backend.encode("").ids[:1] == [bos_id]


def _chat_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        by_name = {entry.get("name"): entry.get("template") for entry in template}
        template = by_name.get("default")
    return template


def _piece_kind(description: Mapping[str, Any], path: Path) -> tuple[PieceKind, bool]:
    steps = _flatten(description.get("decoder"))
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return "byte_level", False
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return "byte_fallback", any(_strips_a_space(step) for step in steps)
    raise ModelFileError(
        f"{path.name}: tokenizer.json decodes by {sorted(map(str, kinds))}; known are "
        "ByteLevel and ByteFallback."
    )


def _flatten(decoder: Any) -> list[Mapping[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder.get("decoders", []) for step in _flatten(part)]
    return [decoder]


def _strips_a_space(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Metaspace":
        return step.get("prepend_scheme", "always") != "never"
    return step.get("type") == "Strip" and step.get("start", 0) > 0
