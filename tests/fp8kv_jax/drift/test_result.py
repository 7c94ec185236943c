"""A replay's result goes to JSON and back, and nothing else is read as one."""

import json

import pytest
import result_examples as example

from fp8kv_jax.drift.result import ReplayResult
from fp8kv_jax.scales.scale_set import ScaleError


def test_json_gives_the_same_result_back():
    result = example.result()
    text = result.to_json()
    assert ReplayResult.from_json(text) == result
    assert ReplayResult.from_json(text.encode()).to_json() == text
    assert json.loads(text)["schema_version"] == 2


def test_parts_that_did_not_run_are_null():
    parts = ("model", "quality", "generated", "drifts", "attribution", "formats")
    result = example.result(**dict.fromkeys(parts))
    assert ReplayResult.from_json(result.to_json()) == result


def test_results_from_before_there_were_formats_are_read():
    result = example.result(formats=None)
    old = json.loads(result.to_json()) | {"schema_version": 1}
    del old["formats"]
    assert ReplayResult.from_json(json.dumps(old)) == result


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.update(schema_version=3), "Expected schema_version 2 .* got 3"),
        (lambda x: x.pop("range"), r"Expected result\.range, got no such field"),
        (lambda x: x.update(more=1), r"Expected no field result\.'more', got one"),
        (
            lambda x: x["verdict"].update(verdict="maybe"),
            r"result\.verdict\.verdict to be 'passed' or 'failed', got 'maybe'",
        ),
        (
            lambda x: x["range"]["slices"][0]["k"]["ratio"][0].__setitem__(0, "1"),
            r"result\.range\.slices\[0\]\.k\.ratio\[0\]\[0\] to be a finite number",
        ),
    ],
)
def test_another_schema_or_a_wrong_field_is_refused(change, message):
    value = json.loads(example.result().to_json())
    change(value)
    with pytest.raises(ScaleError, match=message):
        ReplayResult.from_json(json.dumps(value))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"seconds": NaN}'])
def test_what_is_no_result_is_refused(text):
    with pytest.raises(ScaleError, match="the replay's result"):
        ReplayResult.from_json(text)
