"""Policies: files, bounds by slice, triggers, and what a verdict says."""

import json

import pytest
import result_examples as example

from fp8kv_jax.drift.policy import Policy, judge, make_policy, mix_distance, read_policy
from fp8kv_jax.drift.result import Share
from fp8kv_jax.scales.scale_set import ScaleError


def verdict_of(policy=None, **changes):
    parts = {
        "range_report": example.range_report(),
        "quality": example.quality_report(),
        "generated": example.generated_report(),
        "artifact": example.artifact(),
        "model": example.identity(),
        "workload": example.workload(),
        "settings": example.settings(),
    }
    return judge(policy or Policy(), **(parts | changes))


def outcomes(verdict):
    return {(c.name, c.slice): c.outcome for c in verdict.checks}


def test_a_replay_within_all_bounds_passes_and_says_for_what():
    verdict = verdict_of()
    assert (verdict.verdict, verdict.reasons) == ("passed", ())
    assert verdict.envelope == (
        "FP8 with one scale a KV head passed chat, code to 64 tokens of input and 16 "
        "of output, with the bounds max_accuracy_drop 0.05, max_kl_mean 0.02, "
        "max_perplexity_ratio 1.02, max_saturated_share 1e-06, min_top1_agreement 0.9."
    )
    assert outcomes(verdict)["max_kl_mean", "class=chat"] == "passed"


LIMITS = [
    ("max_saturated_share", 1e-9, {"range_report": example.range_report(1)}),
    ("max_saturated_tokens", 0.5, {"range_report": example.range_report(900)}),
    ("max_amax_ratio", 0.8, {}),
    ("max_kl_mean", 0.003, {}),
    ("max_kl_p99", 0.03, {}),
    ("min_top1_agreement", 0.98, {}),
    ("max_perplexity_ratio", 1.001, {}),
    ("max_attention_error", 0.05, {}),
    ("min_exact_match", 0.6, {}),
    ("max_accuracy_drop", 0.1, {"generated": example.generated_report(0.75, 0.5)}),
]


@pytest.mark.parametrize(("name", "limit", "changes"), LIMITS)
def test_every_bound_can_fail_and_be_switched_off(name, limit, changes):
    nothing = dict.fromkeys([x[0] for x in LIMITS])
    tight = make_policy({"thresholds": nothing | {name: limit}})
    verdict = verdict_of(tight, **changes)
    assert verdict.verdict == "failed"
    assert {c.name for c in verdict.checks if c.outcome == "failed"} == {name}
    assert any(name[4:].replace("_", " ") in words for words in verdict.reasons)
    loose = make_policy({"thresholds": nothing})
    assert verdict_of(loose, **changes).verdict == "passed"


def test_one_bad_class_fails_and_the_envelope_keeps_the_others():
    slices = [example.quality_slice(x) for x in example.PARTS]
    slices[2] = example.quality_slice(example.PARTS[2], kl=0.5)
    verdict = verdict_of(quality=example.quality_report(slices=tuple(slices)))
    assert verdict.reasons == ("class=code: kl mean 0.5 (at most 0.02).",)
    assert verdict.envelope == (
        "FP8 with one scale a KV head did not pass this workload. On their own, these "
        "classes did: chat."
    )


def test_a_bound_missed_by_little_is_told_apart_from_its_limit():
    part = example.quality_slice(example.PARTS[0], kl=0.020_000_4)
    verdict = verdict_of(quality=example.quality_report(slices=(part,)))
    assert verdict.reasons == ("overall: kl mean 0.0200004 (at most 0.02).",)


def test_a_small_slice_is_skipped_and_named():
    verdict = verdict_of()
    small = [c for c in verdict.checks if c.outcome == "skipped"]
    assert [c.slice for c in small] == ["prompt_length=1-40"]
    assert "100 tokens, fewer than 256" in small[0].words
    policy = make_policy({"slices": ["overall"], "min_slice_tokens": 0})
    names = {c.slice for c in verdict_of(policy).checks}
    assert names == {"overall", "generated"}


@pytest.mark.parametrize("action", ["note", "fail", "off"])
@pytest.mark.parametrize(
    ("trigger", "changes"),
    [
        ("model", {"model": example.identity(weights_sha256="1" * 64)}),
        ("tokenizer", {"model": example.identity(tokenizer_sha256="1" * 64)}),
        ("template", {"model": example.identity(chat_template_sha256="1" * 64)}),
        ("context_length", {"workload": example.workload(longest=65)}),
        (
            "traffic_mix",
            {
                "workload": example.workload(
                    classes=[Share(name="law", num_samples=1, num_tokens=1000)]
                )
            },
        ),
    ],
)
def test_a_trigger_notes_fails_or_keeps_quiet(trigger, changes, action):
    policy = make_policy({"triggers": {trigger: action}, "version": "2026-11"})
    verdict = verdict_of(policy, **changes)
    fired = {c.name: c.outcome for c in verdict.checks if c.name.startswith("trigger")}
    want = {"note": "note", "fail": "failed"}.get(action)
    assert fired == ({f"trigger:{trigger}": want} if want else {})
    assert verdict.verdict == ("failed" if action == "fail" else "passed")
    assert verdict.policy_version == "2026-11"


def test_the_distance_of_two_mixes_is_half_the_sum_of_differences():
    assert mix_distance(example.artifact(), example.workload()) == 0
    other = example.artifact(calibrated_classes={"chat": 0.5, "law": 0.5})
    assert mix_distance(other, example.workload()) == pytest.approx(0.5)
    unknown = example.artifact(calibrated_classes=None)
    assert mix_distance(unknown, example.workload()) is None


def test_a_trace_is_judged_by_its_range_alone():
    verdict = verdict_of(quality=None, generated=None, model=None)
    assert verdict.verdict == "passed"
    assert {c.name for c in verdict.checks if c.outcome == "passed"} == {
        "max_saturated_share"
    }
    assert "range alone: no model ran" in verdict.envelope


def test_toml_and_json_make_the_same_policy(tmp_path):
    fields = {
        "name": "strict",
        "version": "2",
        "slices": ["overall", "class"],
        "thresholds": {"max_kl_mean": 0.01, "min_top1_agreement": None},
        "triggers": {"model": "fail", "max_mix_distance": 0.5},
    }
    (tmp_path / "p.json").write_text(json.dumps(fields))
    (tmp_path / "p.toml").write_text(
        'name = "strict"\nversion = "2"\nslices = ["overall", "class"]\n'
        "[thresholds]\nmax_kl_mean = 0.01\nmin_top1_agreement = 'off'\n"
        '[triggers]\nmodel = "fail"\nmax_mix_distance = 0.5\n'
    )
    one, other = (read_policy(tmp_path / f"p.{kind}") for kind in ("json", "toml"))
    assert one == other
    assert one.sha256 == other.sha256 != Policy().sha256
    assert one.thresholds.max_saturated_share == 1e-6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = [", "to be TOML, got"),
        ("thresholds = 3", "Expected thresholds to be a table of fields, got 3"),
        ("limit = 3", "Expected the fields name, version, .* in policy, got 'limit'"),
        ("[thresholds]\nmax_kl = 3", "in thresholds, got 'max_kl'"),
        ("[thresholds]\nmax_kl_mean = 'x'", "max_kl_mean to be a finite number"),
        ("[triggers]\nmodel = 'stop'", "model to be 'note' or 'fail' or 'off'"),
        ("slices = ['class']", 'Expected policy.slices to name "overall"'),
        ("slices = ['day']", "to be 'overall' or 'class'"),
    ],
)
def test_a_wrong_policy_is_one_line_that_names_file_and_field(tmp_path, text, message):
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(ScaleError, match=message) as caught:
        read_policy(path)
    assert "p.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_policy_file_is_one_line(tmp_path):
    with pytest.raises(ScaleError, match="Expected a readable policy file, got"):
        read_policy(tmp_path / "none.toml")
