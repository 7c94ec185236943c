"""The manifest: strict JSON, an id that shows changes, and the schema that ships."""

import copy
import dataclasses
import hashlib
import json
import re
import types
import typing
from typing import Annotated, Literal

import pytest
from artifact_examples import (
    CREATED_AT,
    evidence,
    identity,
    manifest_of,
    scale_set,
)

from fp8kv_jax.scales.fields import Limits, canonical_json, field_hints
from fp8kv_jax.scales.manifest import (
    FORMAT_VERSION,
    RULE_GIVEN,
    SCHEMA_PATH,
    DataFile,
    DataManifest,
    Manifest,
    Percentiles,
    library_versions,
    make_manifest,
    utc_now,
)
from fp8kv_jax.scales.scale_set import ScaleError

SCHEMA = json.loads(SCHEMA_PATH.read_text())


def full_manifest() -> Manifest:
    manifest = manifest_of(scale_set(zeros=[("v", 1, 2)]))
    return dataclasses.replace(manifest, evidence=(evidence(),), scales_sha256="e" * 64)


def full_json():
    return json.loads(full_manifest().to_json())


def parse(value, *, sealed=True) -> Manifest:
    """Reads a manifest's JSON; `sealed` makes the id fit what was changed."""
    if sealed:
        value = copy.deepcopy(value)
        left_out = ("artifact_id", "evidence", "library_versions", "created_at")
        covered = {k: x for k, x in value.items() if k not in left_out}
        digest = hashlib.sha256(canonical_json(covered).encode()).hexdigest()
        value["artifact_id"] = digest[:16]
    return Manifest.from_json(json.dumps(value).encode())


def paths(value, prefix=()):
    """The path of every value inside a JSON value."""
    items = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, x in items:
        yield (*prefix, key)
        yield from paths(x, (*prefix, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def test_a_manifest_survives_json():
    manifest = full_manifest()
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert parse(full_json(), sealed=False) == manifest


def test_make_manifest_fills_in_what_follows_from_the_scales():
    scales = scale_set(layers=(0, 2), zeros=[("k", 1, 2)])
    manifest = make_manifest(
        scales, identity(), data=DataManifest(source="online"), headroom=2
    )
    assert manifest.skipped_layers == (1, 3)
    [silent] = manifest.no_signal
    assert (silent.layer, silent.tensor, silent.group) == (2, "k", 2)
    assert manifest.recipe.granularity == "head"
    assert manifest.library_versions == library_versions()
    assert manifest.library_versions["jax"]
    assert CREATED_AT < manifest.created_at <= utc_now()


# Names of these are free.
FREE = [("data", "classes"), ("evidence", 0, "summary"), ("library_versions",)]
REQUIRED = [
    path
    for path in paths(full_json())
    if isinstance(path[-1], str) and path[:-1] not in FREE
]


@pytest.mark.parametrize("path", REQUIRED, ids=lambda p: ".".join(map(str, p)))
def test_a_missing_field_is_named(path):
    value = full_json()
    del at(value, path[:-1])[path[-1]]
    with pytest.raises(ScaleError, match=r"got no such field|format_version") as caught:
        parse(value, sealed=path != ("artifact_id",))
    assert str(path[-1]) in str(caught.value)


@pytest.mark.parametrize("path", REQUIRED, ids=lambda p: ".".join(map(str, p)))
@pytest.mark.parametrize("wrong", [[None], 1.5, {"x": 1}, True, ""])
def test_a_mistyped_field_is_named(path, wrong):
    value = full_json()
    at(value, path[:-1])[path[-1]] = wrong
    if path[-1] == "headroom" and wrong == 1.5:
        assert parse(value).recipe.headroom == 1.5
        return
    if path[-1] == "summary" and isinstance(wrong, dict):
        assert parse(value).evidence[0].summary == wrong
        return
    with pytest.raises(ScaleError, match=re.escape(str(path[-1]))) as caught:
        parse(value, sealed=path != ("artifact_id",))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1, "1", None, True, 1.0])
def test_another_format_version_is_an_error_before_all_else(version):
    with pytest.raises(ScaleError, match=r"format_version to be 1, .*reads, got"):
        parse({"format_version": version}, sealed=False)


@pytest.mark.parametrize("path", [(), ("recipe",), ("data", "files", 0)])
def test_an_unknown_field_is_named(path):
    value = full_json()
    at(value, path)["surprise"] = 1
    with pytest.raises(ScaleError, match=r"Expected no field manifest.*surprise"):
        parse(value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Expected manifest.json to be JSON"),
        (b"{", "Expected manifest.json to be JSON"),
        (b"\xff{}", "Expected manifest.json to be JSON"),
        (b"[]", "Expected manifest.json to be a JSON object"),
        (b'{"a": NaN}', "the number NaN"),
        (b'{"a": 1, "a": 2}', "repeats a name"),
        (b"[" * 100_000, "Expected manifest.json to be JSON"),
        (b'{"format_version": ' + b"1" * 5000 + b"}", "manifest.json to be JSON"),
    ],
)
def test_what_is_no_json_object_is_one_line(data, message):
    with pytest.raises(ScaleError, match=message) as caught:
        Manifest.from_json(data)
    assert "\n" not in str(caught.value)


def test_an_edited_manifest_shows():
    value = full_json()
    value["model"]["weights_sha256"] = "f" * 64
    with pytest.raises(ScaleError, match="the manifest was changed"):
        parse(value, sealed=False)
    assert parse(value).model.weights_sha256 == "f" * 64


def test_the_id_covers_all_but_when_it_was_written_and_the_evidence():
    manifest = full_manifest()
    same = {
        "created_at": "2027-01-01T00:00:00Z",
        "evidence": (),
        "library_versions": {"jax": "9"},
    }
    assert dataclasses.replace(manifest, **same).artifact_id == manifest.artifact_id
    others = {
        "scales_sha256": "f" * 64,
        "parent": None,
        "model": identity(head_dim=16),
        "data": dataclasses.replace(manifest.data, seed=8),
        "recipe": dataclasses.replace(manifest.recipe, headroom=3.0),
        "envelope": dataclasses.replace(manifest.envelope, languages=None),
        "skipped_layers": (3,),
        "no_signal": (),
    }
    ids = {
        dataclasses.replace(manifest, **{k: x}).artifact_id for k, x in others.items()
    }
    assert len(ids | {manifest.artifact_id}) == len(others) + 1


def test_a_day_that_does_not_exist_is_no_time():
    with pytest.raises(ScaleError, match="created_at to be a date of the calendar"):
        dataclasses.replace(full_manifest(), created_at="2026-02-30T00:00:00Z")
    with pytest.raises(ScaleError, match="created_at to be a UTC time such as"):
        dataclasses.replace(full_manifest(), created_at="yesterday")


def test_a_manifest_without_a_checksum_is_not_written():
    with pytest.raises(ScaleError, match="scales_sha256 to be set, got None"):
        manifest_of(scale_set()).to_json()


def test_percentiles_are_lengths_that_occur():
    assert Percentiles.of([]) is None
    lengths = Percentiles.of([*range(1, 100), 5000])
    assert dataclasses.astuple(lengths) == (50, 90, 99, 5000)


def test_a_data_file_is_hashed(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    file = DataFile.of(tmp_path / "x", name="x", data_class="text")
    assert file.sha256.startswith("ba7816bf8f01cfea")
    assert file.num_bytes == 3


# Scales and manifest together.


@pytest.mark.parametrize(
    ("scales", "changes", "message"),
    [
        (scale_set("tensor"), {}, "granularity to be 'tensor', that of the scales"),
        (scale_set(zeros=[("k", 1, 0)]), {}, "no_signal .* differ in layers 1"),
        (scale_set(layers=(0, 1, 2)), {}, r"each of the model's 4 layers.* layers 3"),
        (scale_set(), {"skipped_layers": (2,)}, "but layers 2 have some"),
        (scale_set(), {"skipped_layers": (9,)}, "for no other; see layers 9"),
        (scale_set(), {"model": identity(num_layers=3)}, "layers 3: another model"),
        (scale_set(), {"model": identity(num_layers=10**30)}, "layers 4, 5, 6"),
        (scale_set(), {"model": identity(num_kv_heads=2)}, "Expected 2 groups"),
    ],
)
def test_a_manifest_of_other_scales_is_refused(scales, changes, message):
    manifest = dataclasses.replace(manifest_of(scale_set()), **changes)
    with pytest.raises(ScaleError, match=message):
        manifest.check_fits(scales)


def test_scales_that_do_not_follow_the_rule_are_refused():
    scales = scale_set()
    wrong = scales.k_scale.copy()
    wrong[2] *= 1.001
    scales = dataclasses.replace(scales, k_scale=wrong)
    with pytest.raises(
        ScaleError, match=r"k_scale to be k_amax \* 2.0 / 448 .* layers 2"
    ):
        manifest_of(scales)
    assert manifest_of(scales, rule=RULE_GIVEN).recipe.rule == "given"
    with pytest.raises(ScaleError, match="headroom to be a number for rule 'amax'"):
        manifest_of(scale_set(), headroom=None)


# The schema that ships.


def validates(value, schema) -> bool:
    """The part of JSON Schema that ours uses, and an error for anything else."""
    known = {
        "$schema", "title", "$defs", "description", "$ref", "anyOf", "const", "enum",
        "type", "properties", "required", "additionalProperties", "items", "pattern",
        "minimum", "minLength", "format",
    }  # fmt: skip
    assert set(schema) <= known
    if "$ref" in schema:
        return validates(
            value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")]
        )
    if "anyOf" in schema:
        return any(validates(value, s) for s in schema["anyOf"])
    if "const" in schema:
        return type(value) is type(schema["const"]) and value == schema["const"]
    if "enum" in schema:
        return value in schema["enum"]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match schema["type"]:
        case "null":
            return value is None
        case "string":
            return (
                isinstance(value, str)
                and re.search(schema.get("pattern", ""), value) is not None
                and len(value) >= schema.get("minLength", 0)
            )
        case "integer":
            return number and value == int(value) and value >= _minimum(schema, value)
        case "number":
            return number and value >= _minimum(schema, value)
        case "array":
            good = isinstance(value, list)
            return good and all(validates(x, schema["items"]) for x in value)
        case "object":
            return isinstance(value, dict) and _members_validate(value, schema)
    raise AssertionError(schema["type"])


def _minimum(schema, value):
    return schema.get("minimum", value)


def _members_validate(value, schema) -> bool:
    properties = schema.get("properties", {})
    rest = schema.get("additionalProperties", True)
    extra = [x for name, x in value.items() if name not in properties]
    return (
        all(name in value for name in schema.get("required", ()))
        and all(validates(value[n], s) for n, s in properties.items() if n in value)
        and (
            rest is True or not extra
            if isinstance(rest, bool)
            else all(validates(x, rest) for x in extra)
        )
    )


def schema_of(hint):
    """What the schema must say of an annotation, in the schema's own words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        limits: Limits = arguments[1]
        found = schema_of(arguments[0])
        if limits.pattern == r"[\s\S]+":
            return found | {"minLength": 1}
        if limits.pattern:
            return found | {"pattern": f"^{limits.pattern}$"}
        return found | {"minimum": limits.minimum}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [schema_of(arguments[0]), {"type": "null"}]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": schema_of(arguments[0])}
    if origin is dict:
        rest = schema_of(arguments[1])
        return {"type": "object"} | ({"additionalProperties": rest} if rest else {})
    if dataclasses.is_dataclass(hint):
        fields = {name: schema_of(x) for name, x in field_hints(hint).items()}
        return {
            "type": "object",
            "properties": fields,
            "required": sorted(fields),
            "additionalProperties": False,
        }
    names = {str: "string", int: "integer", float: "number"}
    return {"type": names[hint]} if hint in names else {}


def resolved(schema):
    """The schema with references followed and remarks left out."""
    if isinstance(schema, list):
        return [resolved(x) for x in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return resolved(SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")])
    remarks = ("$schema", "title", "$defs", "format")
    result = {
        k: {n: resolved(x) for n, x in v.items()} if k == "properties" else resolved(v)
        for k, v in schema.items()
        if k not in remarks and not (k == "description" and isinstance(v, str))
    }
    if "required" in result:
        result["required"] = sorted(result["required"])
    return result


def test_the_schema_says_what_the_dataclasses_say():
    want = schema_of(Manifest)
    want["properties"]["artifact_id"] = resolved({"$ref": "#/$defs/artifact_id"})
    want["required"] = sorted([*want["required"], "artifact_id"])
    # In a file, the version is the present one and the checksum is there.
    want["properties"]["format_version"] = {"const": FORMAT_VERSION}
    [checksum, _] = want["properties"]["scales_sha256"]["anyOf"]
    want["properties"]["scales_sha256"] = checksum
    assert resolved(SCHEMA) == want


WRONG = [None, True, -1, 0, 1, 2.5, "", "text", [], [0], ["x"], {}, {"x": 1}, "f" * 64]


@pytest.mark.parametrize("path", list(paths(full_json())), ids=str)
def test_schema_and_reader_accept_the_same_values(path):
    assert validates(full_json(), SCHEMA)
    for wrong in WRONG:
        value = full_json()
        at(value, path[:-1])[path[-1]] = wrong
        try:
            parse(value, sealed=path != ("artifact_id",))
            reads = True
        except ScaleError as error:
            reads = "the manifest was changed" in str(error)
        assert validates(value, SCHEMA) == reads, wrong
