"""Text to token ids and back, chat prompts, and decoding token by token."""

import codecs
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import tokenizers

from models.chat import render_chat

type PieceKind = Literal["byte_level", "byte_fallback"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer read from a model file; wraps one of the `tokenizers` library.

    Attributes:
      backend: does the encoding.
      piece_kind: how a piece spells bytes: "byte_level" maps each byte to a visible
        character (GPT-2), "byte_fallback" spells a space as U+2581 and a byte that
        has no piece as `<0xXX>` (sentencepiece).
      strip_prefix: decoding drops the space that encoding puts before a text.
      bos_id: token that starts a text, None if the model has none.
      eos_ids: tokens that end a text or a turn.
      add_bos: the model wants its BOS before each text.
      chat_template: jinja source, None if the model has none.
      named_tokens: what templates may ask for, such as `bos_token`.
    """

    backend: tokenizers.Tokenizer
    piece_kind: PieceKind
    strip_prefix: bool = False
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    add_bos: bool = False
    chat_template: str | None = None
    named_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    _special_ids: frozenset[int] = dataclasses.field(init=False)
    _added: Mapping[int, str] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        added = self.backend.get_added_tokens_decoder()
        special = frozenset(index for index, token in added.items() if token.special)
        object.__setattr__(self, "_special_ids", special)
        contents = {index: token.content for index, token in added.items()}
        object.__setattr__(self, "_added", contents)

    @property
    def vocab_size(self) -> int:
        """Number of tokens; a model may have more rows, padding its embedding."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def canonical_json(self) -> str:
        """Spells out what decides which ids a text becomes, for a hash of it.

        The same for the same tables and steps, however the file lays them out. How
        ids become text, what ends a text, and how batches are padded is left out.
        """
        description = json.loads(self.backend.to_str())
        for key in ("version", "padding", "truncation"):
            description.pop(key, None)
        described = {
            "backend": description,
            "bos_id": self.bos_id,
            "add_bos": self.add_bos,
            "named_tokens": dict(self.named_tokens),
        }
        return json.dumps(described, sort_keys=True, separators=(",", ":"))

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Splits a text into token ids.

        Special tokens that the text spells out, such as `<|im_start|>`, become their
        ids: a rendered chat prompt is encoded with this same method. Text from people
        one does not trust should not reach it unescaped.

        Args:
          text: the text; an empty one gives no ids but perhaps the BOS.
          add_bos: True puts the BOS in front, False does not, None does what the
            model file asks for, unless the text spells the BOS out already (as many
            chat templates do).

        Raises:
          ValueError: if `add_bos` is True and the model has no BOS.
        """
        ids = self.backend.encode(text, add_special_tokens=False).ids
        if add_bos and self.bos_id is None:
            raise ValueError(
                "Expected add_bos to be False or None: this tokenizer has no BOS."
            )
        if add_bos is None:
            add_bos = self.add_bos and ids[:1] != [self.bos_id]
        return [self.bos_id, *ids] if add_bos and self.bos_id is not None else ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Joins token ids into text; bytes that are not UTF-8 become U+FFFD."""
        stream = StreamDecoder(self, skip_special_tokens=skip_special_tokens)
        return "".join([stream.push(index) for index in ids]) + stream.flush()

    def stream_decoder(self, *, skip_special_tokens: bool = True) -> "StreamDecoder":
        """Starts decoding a text that arrives token by token."""
        return StreamDecoder(self, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Renders a conversation as the prompt the model was trained on.

        Args:
          messages: dicts with a `role` and a `content`.
          add_generation_prompt: ends with the opening of the assistant's turn.

        Raises:
          ValueError: if the model has no template, or the template refuses.
        """
        if self.chat_template is None:
            raise ValueError("This model has no chat template; give a plain prompt.")
        return render_chat(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            named_tokens=self.named_tokens,
        )

    def is_special(self, index: int) -> bool:
        """Says whether a token is a control token, which no plain text contains."""
        return index in self._special_ids

    def token_bytes(self, index: int) -> bytes:
        """Spells a token in bytes; nothing for an id that has no token."""
        if index in self._added:
            content = self._added[index]
            if self.piece_kind == "byte_fallback":
                content = content.replace(_SPACE_PIECE, " ")
            return content.encode()
        piece = self.backend.id_to_token(index)
        if piece is None:
            return b""
        if self.piece_kind == "byte_fallback":
            match = _BYTE_PIECE.fullmatch(piece)
            if match:
                return bytes([int(match[1], 16)])
            return piece.replace(_SPACE_PIECE, " ").encode()
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
        except KeyError:  # a piece that was never spelled in bytes
            return piece.encode()


class StreamDecoder:
    """Decodes one text token by token and never emits a part of a character.

    What the pushes and the flush return, joined, is what `Tokenizer.decode` gives.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strip_prefix

    def push(self, index: int) -> str:
        """Takes the next token; returns the text that is complete with it."""
        if self._skip_special and self._tokenizer.is_special(index):
            return ""
        spelled = self._tokenizer.token_bytes(index)
        if self._strip and spelled:
            self._strip = False
            spelled = spelled.removeprefix(b" ")
        return self._utf8.decode(spelled)

    def flush(self) -> str:
        """Ends the text; returns U+FFFD if it stops within a character."""
        return self._utf8.decode(b"", final=True)


_SPACE_PIECE = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_character() -> dict[str, int]:
    """Inverts GPT-2's spelling of bytes: printable Latin-1 as it is, others moved.

    The 68 bytes that do not print become U+0100, U+0101, ... in their order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(moved)
    }


_BYTE_OF_CHARACTER = _byte_of_character()
