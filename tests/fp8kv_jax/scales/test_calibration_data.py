"""What calibration reads and draws: passages of files, strata, cuts, batches."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from fp8kv_jax.scales.corpus import (
    DataSource,
    SourceRecord,
    load_passage,
    read_passages,
)
from fp8kv_jax.scales.manifest import ClassCount
from fp8kv_jax.scales.sample_plan import (
    allot,
    bucket_lengths,
    describe_data,
    describe_envelope,
    make_plan,
)

BOS = 1


def encode(content):
    """A token for each character, conversations role by role."""
    if not isinstance(content, str):
        content = "".join(f"<{m['role']}>{m['content']}" for m in content)
    return [ord(character) for character in content]


def source(path, name="x"):
    return DataSource(class_name=name, path=path)


def read(path, max_bytes=1000):
    record = SourceRecord(source=source(path))
    passages = list(read_passages(record, max_bytes=max_bytes))
    return [load_passage(p) for p in passages], record


def plan_of(*sources, num_samples=10, max_seq_len=32, seed=0, **options):
    return make_plan(
        sources,
        encode,
        num_samples=num_samples,
        max_seq_len=max_seq_len,
        seed=seed,
        **options,
    )


def texts(plan):
    return ["".join(map(chr, s.token_ids)) for s in plan.samples]


def jsonl(path, *values):
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return path


@pytest.fixture
def words(tmp_path):
    """A file of 200 lines, each a text of its own length."""
    path = tmp_path / "words.jsonl"
    return jsonl(path, *({"text": f"{i} " + "w" * i} for i in range(200)))


# Reading.


def test_a_text_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path):
    text = "".join(f"line {i} \u00e4\u4e2d\U0001f600\n" for i in range(100))
    path = tmp_path / "a.txt"
    path.write_text(text)
    found, record = read(path, max_bytes=100)
    assert "".join(found) == text
    assert all(passage.endswith("\n") for passage in found)
    assert max(len(passage.encode()) for passage in found) <= 100
    assert record.num_passages == len(found) == 20  # 5 lines each
    assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("max_bytes", range(4, 12))
def test_a_line_without_end_is_cut_between_characters(tmp_path, max_bytes):
    text = "a\u00e4b\u4e2dc\U0001f600" * 20
    path = tmp_path / "a.txt"
    path.write_text(text)
    found, _ = read(path, max_bytes=max_bytes)
    assert "".join(found) == text
    assert max(len(passage.encode()) for passage in found) <= max_bytes


def test_chats_and_texts_come_from_json_lines(tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    path = jsonl(tmp_path / "a.jsonl", {"messages": chat}, {"text": "plain", "id": 3})
    assert read(path)[0] == [chat, "plain"]


def test_white_space_and_chats_without_content_are_counted_as_empty(tmp_path):
    silent = [{"role": "user", "content": " "}]
    path = jsonl(tmp_path / "a.jsonl", {"text": " \n"}, {"messages": silent})
    with path.open("a") as file:
        file.write('\n{"text": "x"}\n{"messages": []}\n')
    found, record = read(path)
    assert found == ["x"]
    assert record.num_empty == 4


def test_a_folder_gives_its_text_files_and_skips_binary_and_hidden_ones(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "two.py").write_text("two")
    (tmp_path / "one.py").write_text("one")
    (tmp_path / "bin").write_bytes(b"a\0b")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / ".git" / "x").write_text("no")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "link.py").symlink_to(tmp_path / "one.py")
    found, record = read(tmp_path)
    assert sorted(found) == ["one", "two"]
    assert (record.num_files, record.num_binary) == (2, 2)


def test_a_folders_hash_follows_names_and_contents(tmp_path):
    (tmp_path / "a.py").write_text("one")
    first = read(tmp_path)[1].sha256
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    renamed = read(tmp_path)[1].sha256
    (tmp_path / "b.py").write_text("two")
    assert len({first, renamed, read(tmp_path)[1].sha256}) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', "Expected JSON in line 2 of .*a.jsonl, got: "),
        (b"[1]", 'Expected an object with "messages" .* in line 2 of'),
        (b'{"text": 3}', 'or "text" \\(a string\\) in line 2 of'),
        (b'{"messages": [{"content": "x"}]}', "Expected an object with"),
        (b'{"messages": "x"}', "Expected an object with"),
        (b'{"text": "\xff"}', "Expected JSON in line 2 of"),
        (b"[" * 100_000, "Expected JSON in line 2 of"),
    ],
)
def test_a_line_that_is_no_sample_is_an_error_with_its_number(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        read(path)


def test_a_text_file_that_is_not_utf8_is_an_error_with_the_offset(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good line\n" * 20 + b"caf\xe9")
    with pytest.raises(ValueError, match="got byte 0xe9 at offset 203"):
        read(path, max_bytes=64)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(
        ValueError, match=r"readable files, got .*nix.txt: No such file"
    ):
        read(tmp_path / "nix.txt")


def test_a_file_that_changes_between_reading_and_use_is_an_error(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    [passage] = read_passages(SourceRecord(source=source(path)), max_bytes=100)
    path.write_text("behind")
    with pytest.raises(ValueError, match="it changed meanwhile"):
        load_passage(passage)


# Drawing.


def test_one_seed_gives_one_plan_and_another_seed_another(words):
    first, same = (texts(plan_of(source(words), seed=3)) for _ in range(2))
    assert first == same
    assert set(first) != set(texts(plan_of(source(words), seed=4)))


def test_the_order_of_lines_and_of_files_does_not_matter(tmp_path, words):
    lines = words.read_text().splitlines(keepends=True)
    halves = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    halves[0].write_text("".join(reversed(lines[90:])))
    halves[1].write_text("".join(lines[:90]))
    split = plan_of(*map(source, halves))
    assert texts(split) == texts(plan_of(source(words)))


def test_equal_passages_of_a_class_are_drawn_once(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "same"}\n{"id": 1, "text":  "same"}\n{"text": "other"}\n')
    plan = plan_of(source(path), source(path))
    assert sorted(texts(plan)) == ["other", "same"]
    assert plan.num_duplicates == 4


def test_classes_share_the_samples_equally(tmp_path, words):
    few = jsonl(tmp_path / "few.jsonl", *({"text": f"few {i}"} for i in range(3)))
    plan = plan_of(source(words, "many"), source(few, "few"), num_samples=20)
    assert plan.classes == ("many", "few")
    counts = np.bincount([s.class_index for s in plan.samples])
    assert counts.tolist() == [17, 3]  # 10 and 10, but few has only 3


def test_lengths_share_the_samples_of_a_class_equally(tmp_path):
    # At 4 bytes a token these stand for up to 125, 250, 500 and 1000 tokens or more.
    sizes = [100] * 500 + [800] * 50 + [1500] * 20 + [4000] * 5
    values = ({"text": f"{i:04}".ljust(n, ".")} for i, n in enumerate(sizes))
    path = jsonl(tmp_path / "a.jsonl", *values)
    plan = plan_of(source(path), num_samples=40, max_seq_len=1000)
    lengths = [len(s.token_ids) for s in plan.samples]
    # 10 of each, but of the longest there are 5; those over 1000 are cut.
    assert [lengths.count(n) for n in (100, 800, 1000)] == [12, 12, 11 + 5]


def test_a_long_text_is_cut_at_a_start_that_follows_the_seed(tmp_path):
    text = "".join(chr(0x4E00 + i) for i in range(300))
    path = jsonl(tmp_path / "a.jsonl", {"text": text})
    starts = set()
    for seed in range(40):
        [sample] = texts(plan_of(source(path), seed=seed))
        assert len(sample) == 32
        assert sample in text
        starts.add(text.index(sample))
    assert len(starts) > 25
    assert min(starts) < 60
    assert max(starts) > 210  # of at most 268


def test_a_cut_keeps_the_bos_in_front(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"text": "\x01" + "abcdefgh" * 40})
    for seed in range(5):
        [sample] = plan_of(source(path), seed=seed, bos_id=BOS).samples
        assert sample.token_ids[0] == BOS
        assert (sample.token_ids[1:] != BOS).all()
        assert len(sample.token_ids) == 32


def test_too_little_text_is_used_as_it_is(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"text": "a"}, {"text": "b"})
    plan = plan_of(source(path), num_samples=512)
    assert len(plan.samples) == 2
    assert plan.num_samples_asked == 512


def test_no_text_at_all_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text(" \n ")
    with pytest.raises(ValueError, match="Expected text in the data, found none in "):
        plan_of(source(tmp_path))


def test_a_tokenizer_that_refuses_names_the_file(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"text": "first"}, {"text": "second"})

    def refuse(content):
        raise ValueError("The chat template failed.")

    with pytest.raises(ValueError, match=r"a.jsonl, at byte \d+: The chat template"):
        make_plan([source(path)], refuse, num_samples=1, max_seq_len=8, seed=0)


def test_nothing_to_draw_from_is_an_error(words):
    with pytest.raises(ValueError, match="Expected at least one data source"):
        plan_of()
    with pytest.raises(ValueError, match="num_samples >= 1"):
        plan_of(source(words), num_samples=0)


def test_memory_does_not_grow_with_the_data(tmp_path):
    # What a draw keeps is bounded by samples asked for, by class and by length.
    from fp8kv_jax.scales.sample_plan import _Draw

    values = ({"text": f"{i} " + "x" * (i % 300)} for i in range(3000))
    path = jsonl(tmp_path / "a.jsonl", *values)
    draw = _Draw("x", 10, 32, 0)
    for passage in read_passages(SourceRecord(source=source(path)), max_bytes=256):
        draw.offer(passage)
    assert draw.num_candidates == 10 * 4


# Counting.


@pytest.mark.parametrize(
    ("total", "available", "expected"),
    [
        (10, [2, 9, 9], [2, 4, 4]),
        (10, [1, 1], [1, 1]),
        (2, [5, 5, 5], [1, 1, 0]),
        (7, [0, 9], [0, 7]),
        (0, [3], [0]),
        (100, [50, 1, 30, 40], [35, 1, 30, 34]),
    ],
)
def test_a_total_is_shared_equally_as_far_as_it_goes(total, available, expected):
    assert allot(total, available) == expected


def test_a_batch_has_few_shapes_and_holds_each_sample_once(words):
    plan = plan_of(source(words), num_samples=100, max_seq_len=64)
    specs = plan.batches(3)
    assert sorted(i for spec in specs for i in spec.samples) == list(range(100))
    assert bucket_lengths(64) == [8, 16, 32, 64]
    assert {(s.num_rows, s.length) for s in specs} <= {
        (24, 8),
        (12, 16),
        (6, 32),
        (3, 64),
    }
    assert [s.length for s in specs] == sorted((s.length for s in specs), reverse=True)


def test_a_built_batch_holds_the_samples_and_zeros(words):
    plan = plan_of(source(words), num_samples=50)
    for spec in plan.batches(2):
        token_ids, lengths = plan.build(spec)
        assert token_ids.shape == (spec.num_rows, spec.length)
        assert (lengths > 0).sum() == len(spec.samples)
        for row, index in enumerate(spec.samples):
            ids = plan.samples[index].token_ids
            assert token_ids[row, : lengths[row]].tolist() == ids.tolist()
            assert not token_ids[row, lengths[row] :].any()


@pytest.mark.parametrize("max_seq_len", [1, 2, 7, 64, 100])
def test_every_length_has_a_bucket(max_seq_len):
    lengths = bucket_lengths(max_seq_len)
    assert lengths[-1] == max_seq_len
    assert lengths[0] >= 1
    assert lengths == sorted(set(lengths))


# What the manifest says.


def test_the_data_manifest_names_files_hashes_and_counts(tmp_path, words):
    code = tmp_path / "code"
    code.mkdir()
    (code / "used.py").write_text("used = 1")
    plan = plan_of(source(words, "text"), source(code, "code"), num_samples=4)
    data = describe_data(plan)
    assert [(f.name, f.data_class) for f in data.files] == [
        ("words.jsonl", "text"),
        ("code/", "code"),
        ("code/used.py", "code"),
    ]
    hashes = [f.sha256 for f in data.files]
    assert hashes[0] == hashlib.sha256(words.read_bytes()).hexdigest()
    assert hashes[2] == hashlib.sha256(b"used = 1").hexdigest()
    assert data.classes is not None
    assert data.classes["code"] == ClassCount(samples=1, tokens=8)
    assert (data.num_samples, data.seed, data.max_length) == (4, 0, 32)
    assert data.tokens_seen == sum(len(s.token_ids) for s in plan.samples)
    assert str(tmp_path) not in repr(data.files)


def test_the_envelope_is_that_of_the_samples(words):
    plan = plan_of(source(words), num_samples=30, max_seq_len=64)
    envelope = describe_envelope(plan)
    lengths = sorted(len(s.token_ids) for s in plan.samples)
    assert envelope.longest_context == lengths[-1]
    assert envelope.prompt_lengths is not None
    assert envelope.prompt_lengths.p50 == lengths[14]
    assert envelope.classes == ("x",)
    shorter = replace(plan, samples=plan.samples[-3:])
    assert describe_envelope(shorter).longest_context == lengths[2]
