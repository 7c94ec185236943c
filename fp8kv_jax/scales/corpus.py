"""Text for calibration: chat JSONL, text files and code folders, read as passages.

Files are streamed: what stays in memory of a passage is where it lies.
"""

import codecs
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

type Form = Literal["text", "json_line"]
type Messages = Sequence[Mapping[str, Any]]
# What a passage holds: a text, or a conversation for the model's chat template.
type Content = str | Messages

JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One place that text comes from.

    Attributes:
      class_name: the data class that its passages belong to.
      path: a .jsonl file, a text file or a folder.
    """

    class_name: str
    path: Path

    @property
    def kind(self) -> Literal["jsonl", "text", "folder"]:
        if self.path.is_dir():
            return "folder"
        is_json = self.path.suffix.lower() in JSON_LINES_SUFFIXES
        return "jsonl" if is_json else "text"


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """A stretch of a file: bytes `offset` to `offset + size`.

    `text_size` is in bytes of UTF-8 and leaves out how JSON wraps a text.
    """

    path: Path
    offset: int
    size: int
    form: Form
    text_size: int
    digest: bytes


@dataclass(kw_only=True)
class SourceRecord:
    """What reading a source found; complete once `read_passages` is exhausted.

    Attributes:
      sha256: of the file; of a folder, of its files' relative names and hashes in
        order.
      num_files: files read; a folder's binary files are among `num_binary` instead.
      num_passages: passages with text; longer texts count as several.
      num_empty: texts of white space alone.
    """

    source: DataSource
    sha256: str = ""
    num_bytes: int = 0
    num_files: int = 0
    num_binary: int = 0
    num_passages: int = 0
    num_empty: int = 0


def read_passages(record: SourceRecord, *, max_bytes: int) -> Iterator[Passage]:
    """Streams the passages of a source, and fills its record on the way.

    Args:
      record: a new record of the source.
      max_bytes: a longer text is split near this size, at the end of a line if there
        is one. A line of JSON is one passage, whatever its size.

    Raises:
      ValueError: if a file is missing, unreadable, not UTF-8 or not the JSON expected.
    """
    source = record.source
    if source.kind != "folder":
        read = _json_lines if source.kind == "jsonl" else _text
        file_hash = yield from _read_file(record, source.path, read, max_bytes)
        record.sha256 = file_hash.hex()
        return
    tree = hashlib.sha256()
    for path in _files_below(source.path):
        if not _is_text(path):
            record.num_binary += 1
            continue
        file_hash = yield from _read_file(record, path, _text, max_bytes)
        name = path.relative_to(source.path).as_posix()
        tree.update(name.encode(errors="surrogateescape") + b"\0" + file_hash)
    record.sha256 = tree.hexdigest()


def load_passage(passage: Passage) -> Content:
    """Reads a passage's content again.

    Raises:
      ValueError: if the file has changed since.
    """
    with _open(passage.path) as file:
        file.seek(passage.offset)
        data = file.read(passage.size)
    content: Content
    try:
        is_text = passage.form == "text"
        content = data.decode("utf-8") if is_text else _parse_line(data, "the line")
    except ValueError:
        content = ""
    if hashlib.sha256(_spell(content)).digest() != passage.digest:
        raise ValueError("Expected a file that stays as it is: it changed meanwhile.")
    return content


def _read_file(
    record: SourceRecord, path: Path, read: Any, max_bytes: int
) -> Iterator[Passage]:
    """Streams one file's passages and returns its SHA-256."""
    file_hash = hashlib.sha256()
    with _open(path) as file:
        for offset, data, content in read(file, path, max_bytes):
            file_hash.update(data)
            record.num_bytes += len(data)
            if _is_empty(content):
                record.num_empty += 1
                continue
            record.num_passages += 1
            spelled = _spell(content)
            yield Passage(
                path=path,
                offset=offset,
                size=len(data),
                form="text" if read is _text else "json_line",
                text_size=len(spelled),
                digest=hashlib.sha256(spelled).digest(),
            )
    record.num_files += 1
    return file_hash.digest()


type Piece = tuple[int, bytes, Content | None]


def _text(file: BinaryIO, path: Path, max_bytes: int) -> Iterator[Piece]:
    """Cuts a text into stretches that are whole characters, and whole lines if short."""
    offset, data = 0, b""
    while True:
        data += file.read(max(1, max_bytes - len(data)))
        if not data:
            return
        size = len(data) if len(data) < max_bytes else _cut(data)
        try:
            text = data[:size].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"Expected UTF-8 text in {path}, got byte "
                f"0x{data[error.start]:02x} at offset {offset + error.start}."
            ) from None
        yield offset, data[:size], text
        offset, data = offset + size, data[size:]


def _cut(data: bytes) -> int:
    """Finds where to cut: after the last line that ends in the second half."""
    newline = data.rfind(b"\n", len(data) // 2)
    if newline >= 0:
        return newline + 1
    size = len(data)
    # A character has at most three continuation bytes, 0b10xxxxxx, after its first.
    for back in range(1, min(4, size) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            width = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return size if width <= back or size == back else size - back
    return size


def _json_lines(file: BinaryIO, path: Path, max_bytes: int) -> Iterator[Piece]:
    del max_bytes
    offset = 0
    for number, line in enumerate(file, 1):
        content = _parse_line(line, f"line {number} of {path}") if line.strip() else ""
        yield offset, line, content
        offset += len(line)


def _parse_line(line: bytes, where: str) -> Content:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Expected JSON in {where}, got: {error}.") from None
    if isinstance(value, dict):
        text, messages = value.get("text"), value.get("messages")
        if isinstance(text, str) and messages is None:
            return text
        if isinstance(messages, list) and all(map(_is_message, messages)):
            return messages
    raise ValueError(
        'Expected an object with "messages" (a list of objects with "role" and '
        f'"content") or "text" (a string) in {where}.'
    )


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _is_empty(content: Content) -> bool:
    if isinstance(content, str):
        return not content.strip()
    contents = (message.get("content") for message in content)
    return not any(c.strip() if isinstance(c, str) else c for c in contents)


def _spell(content: Content) -> bytes:
    """Spells out what a passage says, however its JSON is written."""
    if isinstance(content, str):
        return content.encode(errors="surrogatepass")
    # The NUL keeps a chat apart from a text that spells the same JSON.
    return b"\0" + json.dumps(content, sort_keys=True, ensure_ascii=False).encode(
        errors="surrogatepass"
    )


def _files_below(folder: Path) -> Iterator[Path]:
    """Lists a folder's files in a fixed order, without hidden ones and links."""

    def refuse(error: OSError) -> None:
        raise ValueError(f"Expected a readable folder {folder}: {error.strerror}.")

    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def _is_text(path: Path) -> bool:
    """Says whether a file is UTF-8 without zero bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with _open(path) as file:
            while block := file.read(1 << 16):
                if b"\0" in block:
                    return False
                decoder.decode(block)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ValueError(
            f"Expected --data to name readable files, got {path}: {error.strerror}."
        ) from None
