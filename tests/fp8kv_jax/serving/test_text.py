"""Text that is held back until it is certain to come before a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8kv_jax.serving.text import TextStream


class Letters:
    """Tokens are letters; 99 is half of one, as of a character of two bytes."""

    def __init__(self):
        self.half = ""

    def push(self, index):
        if index == 99:
            self.half = "?"
            return ""
        text, self.half = self.half + chr(index), ""
        return text

    def flush(self):
        return self.half


def stream(text, stop):
    texts = TextStream(Letters(), stop)
    parts = []
    for letter in text:
        parts.append(texts.push(ord(letter)))
        if texts.stopped_by is not None:
            return parts, texts
    parts.append(texts.finish())
    return parts, texts


def test_a_stop_string_over_several_tokens_never_shows():
    parts, texts = stream("see STOP here", ["STOP"])
    assert "".join(parts) == "see "
    assert texts.stopped_by == "STOP"
    assert texts.finish() == ""


def test_a_beginning_that_leads_nowhere_is_let_go():
    parts, texts = stream("a STAR", ["STOP"])
    assert parts == ["a", " ", "", "", "STA", "R", ""]
    assert texts.stopped_by is None


def test_what_was_held_back_comes_at_the_end():
    parts, _ = stream("a ST", ["STOP"])
    assert parts[-1] == "ST"


def test_half_a_character_comes_at_the_end():
    texts = TextStream(Letters(), ())
    assert texts.push(99) == ""
    assert texts.finish() == "?"


@pytest.mark.parametrize(("stop", "by"), [(["b", "ab"], "ab"), (["bc", "b"], "b")])
def test_the_earliest_stop_string_counts(stop, by):
    parts, texts = stream("xabc", stop)
    assert texts.stopped_by == by
    assert "".join(parts) == "xabc"[: "xabc".index(by)]


@given(
    text=st.text("ab", max_size=20),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_texts_joined_are_the_text_before_the_first_stop_string(text, stop):
    parts, texts = stream(text, stop)
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if not ends:
        assert "".join(parts) == text
        return
    # The string that is complete first; of those that end together, the longest.
    end = min(ends)
    begin = min(end - len(s) for s in stop if text[:end].endswith(s))
    assert "".join(parts) == text[:begin]
    assert texts.stopped_by == text[begin:end]
