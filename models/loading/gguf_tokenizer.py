"""Builds a tokenizer from a GGUF file's metadata."""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from models.loading.errors import ModelFileError
from models.tokenizer import PieceKind, Tokenizer


class TokenType(enum.IntEnum):
    """Kinds of tokens, as GGUF numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Control tokens that end a turn in some family. Files name one or two of them by key
# and leave out the rest, such as Qwen's <|endoftext|> beside its <|im_end|>.
_TURN_ENDS = frozenset(
    {
        "<|endoftext|>",
        "<|im_end|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
    }
)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def tokenizer_from_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that `tokenizer.ggml.*` describes.

    Raises:
      ModelFileError: if there is none, its kind or its pre-tokenizer is unknown, or
        its tables disagree.
    """
    keys = _TokenizerKeys(metadata)
    kind = keys.get("model")
    if not keys.get("tokens") or kind is None:
        raise ModelFileError("no tokenizer (no tokenizer.ggml.model and tokens).")
    builder = _BUILDERS.get(kind)
    if builder is None:
        raise ModelFileError(
            f"unknown tokenizer kind {kind!r}; known are {', '.join(_BUILDERS)}."
        )
    keys.check()
    backend = builder(keys)
    backend.add_special_tokens(keys.added(TokenType.CONTROL))
    backend.add_tokens(keys.added(TokenType.USER_DEFINED))
    sentencepiece = kind == "llama"
    piece_kind: PieceKind = "byte_fallback" if sentencepiece else "byte_level"
    return Tokenizer(
        backend=backend,
        piece_kind=piece_kind,
        strip_prefix=sentencepiece and keys.get("add_space_prefix", True),
        bos_id=keys.get("bos_token_id"),
        eos_ids=keys.eos_ids(),
        add_bos=keys.wants_bos(),
        chat_template=metadata.get("tokenizer.chat_template"),
        named_tokens=keys.named_tokens(),
    )


class _TokenizerKeys:
    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = self.get("tokens", [])
        self.types: list[int] = self.get("token_type") or [1] * len(self.tokens)
        if self.get("model") == "llama" and len(self.types) == len(self.tokens):
            self.tokens = [
                token.replace("\u2581", " ")
                if kind == TokenType.USER_DEFINED
                else token
                for token, kind in zip(self.tokens, self.types, strict=True)
            ]

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def check(self) -> None:
        for key in ("token_type", "scores"):
            values = self.get(key)
            if values is not None and len(values) != len(self.tokens):
                raise ModelFileError(
                    f"tokenizer.ggml.{key} has {len(values)} entries for "
                    f"{len(self.tokens)} tokens."
                )
        for key in ("bos_token_id", "unknown_token_id", *_END_KEYS):
            index = self.get(key)
            if index is not None and not 0 <= index < len(self.tokens):
                raise ModelFileError(
                    f"tokenizer.ggml.{key} is {index}, with {len(self.tokens)} tokens."
                )

    def added(self, kind: TokenType) -> list[tokenizers.AddedToken]:
        # Found in the text as it is, before any normalizer sees it.
        special = kind is TokenType.CONTROL
        return [
            tokenizers.AddedToken(token, special=special, normalized=False)
            for token, token_kind in zip(self.tokens, self.types, strict=True)
            if token_kind == kind
        ]

    def eos_ids(self) -> frozenset[int]:
        named = {self.get(key) for key in _END_KEYS} - {None}
        control = {
            index
            for index, (token, kind) in enumerate(
                zip(self.tokens, self.types, strict=True)
            )
            if kind == TokenType.CONTROL and token in _TURN_ENDS
        }
        return frozenset(named | control)

    def wants_bos(self) -> bool:
        if self.get("bos_token_id") is None:
            return False
        # Without the key: sentencepiece and Llama-3 models want it, others do not.
        usual = self.get("model") == "llama" or self.get("pre") in _LLAMA3_NAMES
        return bool(self.get("add_bos_token", usual))

    def named_tokens(self) -> dict[str, str]:
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        found = {
            f"{name}_token": self.get(f"{key}_token_id") for name, key in names.items()
        }
        return {
            name: self.tokens[index]
            for name, index in found.items()
            if index is not None and index < len(self.tokens)
        }


# How text is cut before the merges, by the name in `tokenizer.ggml.pre`. Each regular
# expression is what its models were trained with.
_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"


def _word_pattern(digits: str) -> str:
    return (
        rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_SPLITS: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_word_pattern(r"\p{N}"),),
    **dict.fromkeys(_LLAMA3_NAMES, (_word_pattern(r"\p{N}{1,3}"),)),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}


def _build_byte_level(keys: _TokenizerKeys) -> tokenizers.Tokenizer:
    pre = keys.get("pre", "default")
    if pre not in _SPLITS:
        raise ModelFileError(
            f"unknown pre-tokenizer {pre!r}; known are {', '.join(_SPLITS)}."
        )
    merges = keys.get("merges")
    if not merges:
        raise ModelFileError("no tokenizer.ggml.merges for a gpt2 tokenizer.")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    # Llama 3 takes a word that is a token as it is, whatever its merges say.
    backend = _backend(keys, pairs, ignore_merges=pre in _LLAMA3_NAMES)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        for pattern in _SPLITS[pre]
    ]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _build_sentencepiece(keys: _TokenizerKeys) -> tokenizers.Tokenizer:
    scores = keys.get("scores")
    if not scores:
        raise ModelFileError("no tokenizer.ggml.scores for a llama tokenizer.")
    unknown = keys.get("unknown_token_id")
    backend = _backend(
        keys,
        _merges_from_scores(keys.tokens, keys.types, scores),
        unk_token=None if unknown is None else keys.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "\u2581")]
    if keys.get("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("\u2581"))
    backend.normalizer = normalizers.Sequence(steps)
    return backend


def _merges_from_scores(
    tokens: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Recovers merges: every way to cut a piece in two pieces, best score first.

    Sentencepiece joins the neighbours whose union scores best. Only normal pieces
    take part: control and user-defined ones are cut out of the text beforehand.
    """
    score_of = {
        token: score
        for token, kind, score in zip(tokens, types, scores, strict=True)
        if kind == TokenType.NORMAL
    }
    merges = [
        (-score, token[:cut], token[cut:])
        for token, score in score_of.items()
        for cut in range(1, len(token))
        if token[:cut] in score_of and token[cut:] in score_of
    ]
    merges.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in merges]


def _backend(
    keys: _TokenizerKeys, merges: Sequence[tuple[str, ...]], **options: Any
) -> tokenizers.Tokenizer:
    vocab = {token: index for index, token in enumerate(keys.tokens)}
    if len(vocab) != len(keys.tokens):
        raise ModelFileError(
            f"tokenizer.ggml.tokens repeats {len(keys.tokens) - len(vocab)} tokens."
        )
    try:
        return tokenizers.Tokenizer(
            models.BPE(vocab=vocab, merges=list(merges), **options)  # pyrefly: ignore
        )
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"tokenizer tables disagree: {error}.") from None


type _Builder = Callable[[_TokenizerKeys], tokenizers.Tokenizer]
_BUILDERS: Mapping[str, _Builder] = {
    "gpt2": _build_byte_level,
    "llama": _build_sentencepiece,
}
