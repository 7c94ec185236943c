"""What `fp8kv replay` prints: every finding once, and what it is a finding of."""

import dataclasses

import pytest
import result_examples as example

from fp8kv_jax.cli.replay_report import show


@pytest.fixture
def printed(capsys):
    def show_result(**changes):
        show(example.result(**changes), as_json=False)
        out, err = capsys.readouterr()
        assert out == ""
        return err

    return show_result


def test_parts_measured_on_a_sample_say_its_size(printed):
    err = printed()
    attribution, formats = example.attribution(), example.formats()
    for title, part in (("Attribution", attribution), ("Formats", formats)):
        size = f"{part.num_tokens:,} tokens of {part.num_samples} samples"
        assert f"{title}, {size}" in err
    assert "one scale a head of this traffic" in err


def test_bytes_are_spelled_out_against_bf16(printed):
    fp8, bf16 = example.capacity().fp8, example.capacity().bf16
    line = next(x for x in printed().splitlines() if x.startswith("cache:"))
    for number in (fp8.total, fp8.page_end_waste, fp8.scales, fp8.block_tables):
        assert f" {number:,}" in line
    assert f"against {bf16.total:,} in BF16" in line


def test_a_bad_token_that_several_samples_share_is_one_line(printed):
    token = example.quality_report().worst_tokens[0]
    worst = tuple(dataclasses.replace(token, sample=f"line {i}") for i in range(3))
    err = printed(quality=example.quality_report(worst_tokens=worst))
    assert err.count("worst: ") == 1
    assert "in line 0 and 2 more at token" in err


def test_slices_too_small_to_judge_share_a_line(printed):
    check = example.verdict().checks[0]
    small = [
        dataclasses.replace(
            check, outcome="skipped", slice=f"class={name}", value=size, limit=256.0
        )
        for name, size in (("chat", 12.0), ("code", 7.0))
    ]
    verdict = dataclasses.replace(example.verdict(), checks=tuple(small))
    err = printed(verdict=verdict)
    assert "skipped: fewer than 256 tokens: class=chat (12), class=code (7)" in err
