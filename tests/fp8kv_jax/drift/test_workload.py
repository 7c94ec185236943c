"""Workload files: what is read, what is refused and where, and what is drawn."""

import json

import numpy as np
import pytest

from fp8kv_jax.drift.workload import Sample, encode_sample, read_samples, scan
from fp8kv_jax.drift.workload_draw import Draw
from fp8kv_jax.drift.workload_slices import interval_names, make_slices

QUESTION = {"role": "user", "content": "one two"}
ANSWER = {"role": "assistant", "content": "three"}


def encode(content, answer):
    """A token for each word; a chat has one more for each turn, and an answer's."""
    if isinstance(content, str):
        return [len(word) for word in content.split()]
    words = [len(w) for m in content for w in [*m["content"].split(), ""]]
    return words + [99] * answer


def write(tmp_path, *lines):
    path = tmp_path / "w.jsonl"
    spelled = (x if isinstance(x, str) else json.dumps(x) for x in lines)
    path.write_text("\n".join(spelled) + "\n")
    return path


def test_a_line_says_its_class_language_answers_and_name(tmp_path):
    path = write(
        tmp_path,
        {"prompt": "a b"},
        "",
        {"messages": [QUESTION, ANSWER], "class": "qa", "language": "en"},
        {"text": "c", "expected": "yes", "id": "third"},
        {"prompt": "d", "expected": ["1", "one"]},
    )
    first, second, third, fourth = read_samples(path)
    assert (first.name, first.data_class, first.language) == (
        "line 1",
        "text",
        "unknown",
    )
    assert (second.line, second.data_class, second.language) == (3, "qa", "en")
    assert (third.name, third.expected) == ("third", ("yes",))
    assert fourth.expected == ("1", "one")


def test_a_chat_is_scored_whole_and_continued_without_its_answer(tmp_path):
    path = write(tmp_path, {"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION]})
    answered, asked = read_samples(path)
    assert answered.data_class == "chat"
    assert encode_sample(answered, encode, path) == [3, 3, 0, 5, 0]
    assert encode_sample(answered, encode, path, answer=True) == [3, 3, 0, 99]
    assert encode_sample(asked, encode, path, answer=True) == [3, 3, 0, 99]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expected JSON in line 2 of"),
        ("[]", "Expected an object in line 2 of"),
        ('{"prompt": ""}', 'Expected either "prompt" .a text. or "messages"'),
        ('{"prompt": 3}', "in line 2 of"),
        ('{"prompt": "a", "text": "b"}', "in line 2 of"),
        ('{"messages": []}', "in line 2 of"),
        ('{"messages": [{"role": "user"}]}', "in line 2 of"),
        (json.dumps({"messages": [ANSWER]}), "not alone an answer"),
        ('{"prompt": "a", "klass": "b"}', "in line 2 of .*, got 'klass'"),
        ('{"prompt": "a", "class": 3}', 'Expected "class" to be a text in line 2'),
        ('{"prompt": "a", "language": ""}', 'Expected "language" to be a text'),
        ('{"prompt": "a", "expected": 3}', 'Expected "expected" to be an answer'),
        ('{"prompt": "a", "expected": [" "]}', "or a list of answers in line 2"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(tmp_path, line, message):
    path = write(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(ValueError, match=message):
        list(read_samples(path))


def test_a_sample_without_tokens_and_a_refusing_template_name_the_line(tmp_path):
    path = write(tmp_path, {"prompt": "a"})
    (sample,) = read_samples(path)
    with pytest.raises(ValueError, match=r"Expected text in line 1 of .*, got none"):
        encode_sample(sample, lambda content, answer: [], path)

    def refuse(content, answer):
        raise ValueError("no template")

    with pytest.raises(ValueError, match=r"line 1 of .*: no template"):
        encode_sample(sample, refuse, path)


def test_missing_files_empty_files_and_too_many_classes_are_errors(tmp_path):
    with pytest.raises(ValueError, match="Expected a readable file, got"):
        scan(tmp_path / "none.jsonl", encode, max_tokens=8)
    with pytest.raises(ValueError, match=r"Expected a sample in .*, found none"):
        scan(write(tmp_path, ""), encode, max_tokens=8)
    lines = [{"prompt": "a", "class": f"c{i}"} for i in range(33)]
    with pytest.raises(ValueError, match=r"at most 32 classes .* 'c32'.* in line 33"):
        scan(write(tmp_path, *lines), encode, max_tokens=8)


def test_a_scan_counts_samples_tokens_cuts_and_answers(tmp_path):
    lengths = [1, 2, 3, 4, 5, 6, 7, 8, 20]
    lines = [
        {"prompt": "w " * n, "class": "odd" if n % 2 else "even", "expected": "x"}
        for n in lengths
    ]
    tally = scan(write(tmp_path, *lines), encode, max_tokens=10)
    assert (tally.num_samples, tally.num_cut, tally.num_with_answer) == (9, 1, 9)
    assert tally.num_tokens == sum(lengths) - 10
    assert tally.classes == {"odd": [4, 16], "even": [5, 30]}
    cut = np.minimum(lengths, 10)
    for share in (0.25, 0.5, 0.95, 1):
        want = np.percentile(cut, 100 * share, method="inverted_cdf")
        assert tally.percentile(share) == want


def test_each_token_is_in_one_slice_of_every_dimension(tmp_path):
    lines = [{"prompt": "w " * n, "class": f"c{n % 2}"} for n in (4, 8, 16, 32)]
    tally = scan(write(tmp_path, *lines), encode, max_tokens=64)
    slices = make_slices(tally, max_new_tokens=20)
    ids = slices.of_tokens(
        data_class="c0",
        language="unknown",
        prompt_length=8,
        positions=np.arange(6, 30, dtype=np.int32),
    )
    named = [[slices.names[i] for i in row] for row in ids]
    assert named[0] == [
        ("overall", "all"),
        ("class", "c0"),
        ("language", "unknown"),
        ("prompt_length", "5-8"),
        ("generation_position", "prompt"),
    ]
    last = [row[-1][1] for row in named]
    assert last == ["prompt"] * 2 + ["1-16"] * 16 + ["17-64"] * 6
    longer = slices.of_tokens(
        data_class="c0",
        language="unknown",
        prompt_length=60,  # a prompt with the answer's opening may be longer
        positions=np.zeros(1, np.int32),
    )
    assert slices.names[longer[0, 3]] == ("prompt_length", "9-32")


def test_intervals_are_spelled_by_their_ends():
    assert interval_names((1, 16, 17)) == ["1", "2-16", "17"]


def test_a_draw_does_not_depend_on_order_and_shares_out_classes():
    items = [(f"{i}", "big" if i % 10 else "small") for i in range(200)]

    def draw(order, size, seed=0):
        drawn = Draw(size, seed=seed)
        for key, name in order:
            drawn.offer(key, key=key, data_class=name)
        return drawn.items()

    want = draw(items, 12)
    assert draw(items[::-1], 12) == want
    assert draw(items, 6) == want[:6]
    assert draw(items, 12, seed=1) != want
    assert sum(int(key) % 10 == 0 for key in want) == 6
    assert draw(items, 0) == []
    assert len(draw(items[:3], 12)) == 3


def test_what_goes_first_is_drawn_first():
    drawn = Draw(3, seed=0)
    for i in range(100):
        drawn.offer(i, key=str(i), data_class="c", first=i in (17, 71))
    assert {17, 71} < set(drawn.items())


def test_the_prompt_of_a_text_is_all_of_it():
    sample = Sample(
        line=1, name="x", content="abc", data_class="c", language="l", expected=()
    )
    assert sample.prompt == "abc"
