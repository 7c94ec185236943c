"""Tokenizers built from metadata, decoding token by token, and chat templates."""

import dataclasses
import itertools
import random
import re

import pytest
from tokenizers import pre_tokenizers

from models.loading import ModelFileError
from models.loading.gguf_tokenizer import TokenType, tokenizer_from_metadata
from models.tokenizer import Tokenizer

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
N, C, U, B = (
    TokenType.NORMAL,
    TokenType.CONTROL,
    TokenType.USER_DEFINED,
    TokenType.BYTE,
)


def byte_level(pre="gpt-2", merges=("t h", "th e"), **more) -> Tokenizer:
    """All 256 bytes, the given merges, and three special tokens."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LETTERS]
    tokens += [merge.replace(" ", "") for merge in merges]
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [C, C, C, *[N] * (len(tokens) - 3)],
        "merges": list(merges),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }
    return tokenizer_from_metadata(
        {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    )


# Pieces with their scores; the byte pieces come on top.
PIECES = {
    "\u2581": -10.0,
    "a": -11.0,
    "b": -12.0,
    "c": -13.0,
    "ab": -1.0,
    "bc": -0.5,
    "abc": -3.0,
    "\u2581a": -2.0,
    "\u2581ab": -4.0,
    "aa": -5.0,
}


def sentencepiece(**more) -> Tokenizer:
    metadata = {
        "model": "llama",
        "tokens": sentencepiece_tokens(),
        "scores": [0.0] * 5 + [0.0] * 256 + list(PIECES.values()),
        "token_type": [2, C, C, U, U] + [B] * 256 + [N] * len(PIECES),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": False,
        **more,
    }
    return tokenizer_from_metadata(
        {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    )


def sentencepiece_tokens() -> list[str]:
    fixed = ["<unk>", "<s>", "</s>", "\u2581\u2581", "\n\n"]
    return [*fixed, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]


def join_by_score(text: str) -> list[str]:
    """Sentencepiece's rule, one step at a time: join the best pair, leftmost first."""
    pieces = []
    for part in re.split("(  |\n\n)", text):
        symbols = (
            [part] if part in ("  ", "\n\n") else list(part.replace(" ", "\u2581"))
        )
        while True:
            pairs = [
                (PIECES[left + right], -at)
                for at, (left, right) in enumerate(itertools.pairwise(symbols))
                if left + right in PIECES
            ]
            if not pairs:
                break
            at = -max(pairs)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        pieces += symbols
    return pieces


def spell(pieces: list[str]) -> list[str]:
    """Replaces what is no piece by its bytes."""
    known = {*PIECES, "  ", "\n\n"}
    return [
        spelled
        for piece in pieces
        for spelled in (
            [piece] if piece in known else [f"<0x{x:02X}>" for x in piece.encode()]
        )
        if piece
    ]


def test_scores_join_pieces_as_sentencepiece_does():
    tokenizer = sentencepiece()
    tokens = sentencepiece_tokens()
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice("aaabbc  \né🙂") for _ in range(rng.randrange(30)))
        ids = tokenizer.encode(text, add_bos=False)
        got = [tokens[index].replace("\u2581\u2581", "  ") for index in ids]
        assert got == spell(join_by_score(text)), repr(text)
        assert tokenizer.decode(ids) == text


def test_a_space_prefix_is_added_and_taken_off_again():
    tokenizer = sentencepiece(add_space_prefix=True)
    tokens = sentencepiece_tokens()
    ids = tokenizer.encode("ab c", add_bos=False)
    assert [tokens[i] for i in ids] == ["\u2581ab", "\u2581", "c"]
    assert tokenizer.decode(ids) == "ab c"


def test_bos_is_added_by_default_once_and_on_request():
    tokenizer = sentencepiece()
    a = sentencepiece_tokens().index("a")
    assert tokenizer.encode("a") == [1, a]
    assert tokenizer.encode("<s>a") == [1, a]
    assert tokenizer.encode("a", add_bos=False) == [a]
    assert tokenizer.encode("<s>a", add_bos=True) == [1, 1, a]
    assert tokenizer.encode("") == [1]


def test_byte_level_models_add_no_bos_unless_the_file_says_so():
    assert byte_level().encode("a") == [3 + LETTERS.index("a")]
    assert byte_level(add_bos_token=True).encode("a")[0] == 1
    assert byte_level(pre="llama-bpe").encode("a")[0] == 1
    assert byte_level(bos_token_id=None).encode("") == []
    with pytest.raises(ValueError, match="this tokenizer has no BOS"):
        byte_level(bos_token_id=None).encode("a", add_bos=True)


def pieces_of(pre, text):
    tokenizer = byte_level(pre=pre)
    normalizer = tokenizer.backend.normalizer
    if normalizer is not None:
        text = normalizer.normalize_str(text)
    split = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    spelled = [
        b"".join(tokenizer.token_bytes(tokenizer.backend.token_to_id(c)) for c in piece)
        for piece, _ in split
    ]
    return [piece.decode() for piece in spelled]


@pytest.mark.parametrize(
    ("pre", "text", "wanted"),
    [
        ("gpt-2", "It's 123 a", ["It", "'s", " 123", " a"]),
        ("gpt-2", "a  b\n\n", ["a", " ", " b", "\n\n"]),
        ("gpt-2", "don'T", ["don", "'", "T"]),
        ("smollm", "It's 123 a", ["It", "'s", " ", "1", "2", "3", " a"]),
        ("qwen2", "don'T 123", ["don", "'T", " ", "1", "2", "3"]),
        ("qwen2", "a(b)\n\nc", ["a", "(b", ")\n\n", "c"]),
        ("qwen2", "e\u0301", ["\u00e9"]),
        ("llama-bpe", "a 12345\n b", ["a", " ", "123", "45", "\n", " b"]),
        ("llama-bpe", "e\u0301", ["e", "\u0301"]),
        ("default", "x+=12345", ["x", "+=", "123", "45"]),
    ],
)
def test_text_is_cut_as_the_named_pre_tokenizer_does(pre, text, wanted):
    assert pieces_of(pre, text) == wanted


def test_llama3_takes_a_whole_word_that_is_a_token():
    # The merges cannot reach "abc": its halves join another way first.
    more = {"merges": ("b c", "a b", "ab c")}
    tokenizer = byte_level(pre="llama-bpe", **more)
    assert len(tokenizer.encode("abc", add_bos=False)) == 1
    assert len(byte_level(pre="gpt-2", **more).encode("abc")) == 2


def test_special_tokens_in_the_text_become_their_ids():
    tokenizer = byte_level()
    ids = tokenizer.encode("<|im_start|>the<|im_end|>")
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    assert tokenizer.decode(ids) == "the"
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    assert shown == "<|im_start|>the<|im_end|>"


def test_ends_are_those_named_and_the_known_control_tokens():
    assert byte_level().eos_ids == {0, 2}
    assert byte_level(eot_token_id=7).eos_ids == {0, 2, 7}


def test_any_bytes_decode_as_utf8_with_replacement():
    tokenizer = byte_level()
    rng = random.Random(1)
    for _ in range(100):
        ids = [rng.randrange(3, tokenizer.vocab_size) for _ in range(20)]
        wanted = b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
        assert tokenizer.decode(ids) == wanted
        assert tokenizer.backend.decode(ids) == wanted


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_a_stream_never_shows_half_a_character(make):
    tokenizer = make()
    text = "né 日本 🙂👩‍🚀 end"
    stream = tokenizer.stream_decoder()
    parts = [stream.push(index) for index in tokenizer.encode(text)]
    assert "\ufffd" not in "".join(parts)
    assert "🙂" in parts  # whole, with the last of its four bytes
    assert "".join(parts) + stream.flush() == text


def test_a_stream_that_stops_inside_a_character_says_so_at_the_end():
    tokenizer = byte_level()
    stream = tokenizer.stream_decoder()
    ids = tokenizer.encode("a🙂")[:-1]
    assert "".join(stream.push(index) for index in ids) == "a"
    assert stream.flush() == "\ufffd"


def test_ids_without_a_token_decode_to_nothing():
    assert byte_level().decode([10**6]) == ""


USER = {"role": "user", "content": "<b>hi</b>"}


def chat(template, *messages, **options):
    tokenizer = byte_level()
    metadata = {"chat_template": template, "named_tokens": {"bos_token": "<s>"}}
    fields = {"backend": tokenizer.backend, "piece_kind": "byte_level", **metadata}
    return Tokenizer(**fields).apply_chat_template(messages or [USER], **options)


def test_templates_see_messages_tokens_and_the_generation_prompt():
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m['content'] }};"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert chat(template) == "<s>user:<b>hi</b>;assistant:"
    assert chat(template, add_generation_prompt=False) == "<s>user:<b>hi</b>;"


def test_templates_have_the_usual_helpers():
    assert chat("{{ messages[0] | tojson }}") == (
        '{"role": "user", "content": "<b>hi</b>"}'
    )
    assert re.fullmatch(r"\d{4}", chat("{{ strftime_now('%Y') }}"))
    assert (
        chat(
            "{% for x in [1, 2] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}"
            "{% endfor %}"
        )
        == "1"
    )
    with pytest.raises(ValueError, match="chat template failed: roles must alternate"):
        chat("{{ raise_exception('roles must\nalternate') }}")


def test_block_lines_leave_no_blank_lines():
    assert chat("  {% if true %}\nx\n  {% endif %}\n") == "x\n"


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 + '' }}",
    ],
)
def test_a_bad_or_hostile_template_is_an_error(template):
    with pytest.raises(ValueError, match="The chat template failed"):
        chat(template)


def test_a_model_without_a_template_says_so():
    with pytest.raises(ValueError, match="no chat template; give a plain prompt"):
        byte_level().apply_chat_template([USER])


def test_a_sentencepiece_file_without_scores_is_refused():
    with pytest.raises(ModelFileError, match=r"no tokenizer\.ggml\.scores"):
        sentencepiece(scores=None)


def test_the_canonical_json_changes_with_what_makes_ids_and_with_nothing_else():
    same = [byte_level(), byte_level()]
    same[1].backend.enable_padding()
    same[1].backend.enable_truncation(7)
    ends_elsewhere = dataclasses.replace(byte_level(), eos_ids=frozenset({0}))
    spelled = {x.canonical_json() for x in [*same, ends_elsewhere]}
    assert len(spelled) == 1
    others = [
        byte_level(merges=("t h",)),
        byte_level(pre="qwen2"),
        byte_level(add_bos_token=True),
        byte_level(bos_token_id=0),
        sentencepiece(),
        dataclasses.replace(byte_level(), named_tokens={"bos_token": "<s>"}),
    ]
    assert len(spelled | {x.canonical_json() for x in others}) == len(others) + 1
