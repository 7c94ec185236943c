"""The report: one file, everything in it, nothing let through."""

import dataclasses
import html.parser
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import result_examples as example

from fp8kv_jax.drift import report_charts as charts
from fp8kv_jax.drift.report import render, write_report
from fp8kv_jax.drift.result import (
    LayerLoss,
    PositionCurve,
    RangeSlice,
    ReplayResult,
    Slice,
)

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(html.parser.HTMLParser):
    """Collects tags, attributes and text, and checks that tags are closed in turn."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID and not self.get_starttag_text().endswith("/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def page():
    return Page(render(example.result()))


def wide_result(layers=32, heads=8):
    """As large a model as a report should serve, with something to show everywhere."""

    def grid(value):
        return [[value] * heads] * layers

    table = dataclasses.replace(
        example.range_table(),
        live_amax=grid(3.25),
        ratio=grid(1.25),
        saturated=grid(3),
        saturated_tokens=grid(2),
        underflowed=grid(5),
        nonfinite=grid(0),
        histogram=grid([40] * 24),
    )
    ranges = example.range_report(
        layers=tuple(range(layers)),
        num_kv_heads=heads,
        k_scale=grid(0.1),
        v_scale=grid(0.1),
        k_calibrated_amax=grid(2.6),
        v_calibrated_amax=grid(2.6),
        histogram_edges=(-18.8, *map(float, range(-18, 4))),
        slices=[RangeSlice(slice=x, k=table, v=table) for x in example.PARTS],
    )
    quality = example.quality_report(attention_error=grid(0.0425))
    attribution = dataclasses.replace(
        example.attribution(),
        layers=tuple(
            LayerLoss(
                layer=i, kl_mean=0.001, share=1 / 32, top1_agreement=0.9, head_kl=None
            )
            for i in range(layers)
        ),
    )
    return example.result(range=ranges, quality=quality, attribution=attribution)


def test_everything_is_in_the_page(page):
    text = page.text
    result = example.result()
    assert "Passed" in text
    for words in (
        result.verdict.envelope,
        "--kv-high-precision-layers 2: ...",
        result.drifts.words,
        result.range.flags[0].words,
        result.artifact.artifact_id,
        "fp8kv replay --fp8-kv-scales 0123456789abcdef --workload w.jsonl",
        "20,000 (19.5 KiB)",
        'full precision " France" 60.00%, FP8 " Spain" 40.00%',
        "10.00% 90.00%",
        "jax 0.12.0.1",
        "differs at token 1 of 3",
    ):
        assert " ".join(words.split()) in text
    names = [value for _, name, value in page.attributes if name == "aria-label"]
    assert "K: live over calibrated amax by layer and head" in names
    assert "Mean KL by class" in names
    assert "Mean KL with FP8 in one layer alone, by layer" in names
    assert len(names) == page.tags.count("svg") + page.tags.count("nav")


def test_a_failed_verdict_gives_its_reasons():
    text = Page(render(example.result(verdict=example.verdict("failed")))).text
    assert "Failed" in text
    assert "overall: kl mean 0.004 (at most 0.02)." in text


def test_nothing_is_loaded_and_nothing_runs(page):
    for tag, name, value in page.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "srcset", "data", "action")
        if name == "href":
            assert tag == "a"
            assert value.startswith("#")
    assert not {"script", "link", "iframe", "img", "object", "base"} & set(page.tags)
    styles = render(example.result())
    assert "url(" not in styles
    assert "@import" not in styles


def test_links_lead_to_sections(page):
    ids = {value for _, name, value in page.attributes if name == "id"}
    links = {value[1:] for _, name, value in page.attributes if name == "href"}
    assert links <= ids


@pytest.mark.parametrize(
    "text",
    ["</bdi><script>alert(1)</script>", "\"'><img src=x onerror=alert(1)>", "&lt;"],
)
def test_text_of_the_workload_stays_text(text, page):
    worst = dataclasses.replace(
        example.quality_report().worst_tokens[0],
        **dict.fromkeys(
            ("sample", "data_class", "language", "context", "next_token", "fp8_top"),
            text,
        ),
    )
    generated = example.generated_report()
    shown = dataclasses.replace(
        generated.examples[0],
        prompt=text,
        full_text=text,
        fp8_text=text,
        expected=(text,),
    )
    parts = [dataclasses.replace(x, name=text) for x in example.PARTS]
    table = example.range_table()
    result = example.result(
        model_name=text,
        quality=example.quality_report(
            worst_tokens=(worst,), slices=[example.quality_slice(x) for x in parts]
        ),
        generated=dataclasses.replace(generated, examples=(shown,)),
        range=example.range_report(
            slices=[RangeSlice(slice=x, k=table, v=table) for x in parts]
        ),
        artifact=example.artifact(allowed_mismatches=(text,)),
    )
    found = Page(render(result))
    assert set(found.tags) == set(page.tags)
    assert not [name for _, name, _ in found.attributes if name.startswith("on")]
    assert "".join(found.words).count(text) > 10


def test_bad_tokens_of_the_same_text_are_shown_once():
    first = example.quality_report().worst_tokens[0]
    same = [dataclasses.replace(first, sample=f"line {i}", kl=0.3) for i in range(4)]
    other = dataclasses.replace(first, fp8_top=" Rome", kl=0.2)
    quality = example.quality_report(worst_tokens=(first, *same, other))
    text = Page(render(example.result(quality=quality))).text
    assert "in line 3, token 17 (chat, en), and 4 more like it" in text
    assert text.count("token 17 (chat, en)") == 2


def test_characters_that_html_lacks_are_replaced():
    worst = dataclasses.replace(
        example.quality_report().worst_tokens[0], context="a\x00b\x1bc\ud800d\n\te"
    )
    page = render(example.result(quality=example.quality_report(worst_tokens=(worst,))))
    page.encode()
    assert "a\ufffdb\ufffdc\ufffdd\n\te" in page


def test_a_trace_has_range_and_capacity_alone():
    result = example.result(
        model=None,
        quality=None,
        generated=None,
        drifts=None,
        attribution=None,
        workload=dataclasses.replace(example.workload(), kind="trace"),
    )
    page = Page(render(result))
    ids = {value for _, name, value in page.attributes if name == "id"}
    assert {"range", "capacity", "checks"} <= ids
    assert not {"quality", "generated", "attribution"} & ids
    assert "--max-new-tokens" not in page.text


def test_the_command_traces_a_loss_as_closely(page):
    assert "--attribute heads" in page.text
    attribution = example.result().attribution
    layers = [dataclasses.replace(x, head_kl=None) for x in attribution.layers]
    shallow = dataclasses.replace(attribution, layers=tuple(layers))
    assert "--attribute layers" in render(example.result(attribution=shallow))


def test_formats_stand_beside_their_bytes(page):
    assert "int8_token_head 0.001 95.00% 2.00% 144 48 0" in page.text
    assert "--formats fp8_head,int8_token_head" in page.text
    without = Page(render(example.result(formats=None, attribution=None))).text
    assert "--attribute none --formats none" in without
    assert "int8_token_head" not in without


def test_rounding_costs_no_more_than_what_was_measured_with_the_saved_scales(page):
    assert "nothing leaves it 0.011 nats of mean KL remain with scales" in page.text
    drifts = dataclasses.replace(
        example.result().drifts, kl_fitted=0.023, kl_from_scales=-0.011
    )
    text = Page(render(example.result(drifts=drifts))).text
    assert "nothing leaves it 0.012 nats of mean KL on the attribution's" in text
    assert "nothing Scales made from this very traffic do no better: 0.023" in text


def test_no_saturation_is_a_sentence_and_some_is_a_map(page):
    assert "No value of K does." in page.text
    text = render(example.result(range=example.range_report(saturated=8)))
    assert "No value of K does." not in text
    # 8 of 1,000 tokens of 8 values.
    assert "8 of 8,000 values saturated, in 8 of 1,000 tokens" in text
    assert ">1e-3</text>" in text


def test_a_large_model_stays_below_a_megabyte():
    text = render(wide_result())
    page = Page(text)
    assert len(text.encode()) < 1_000_000
    for layer in (0, 31):
        assert (
            f"layer {layer}, head 7: live amax 3.25, calibrated 2.6, ratio 1.25" in text
        )
    assert page.text.count("1.25") > 2 * 32 * 8


def test_an_empty_end_of_a_curve_is_left_out():
    def curve(**changes):
        fields = {
            "axis": "context",
            "edges": (0, 16, 64, 256),
            "num_tokens": (600, 400, 0),
            "kl_mean": (0.005, 0.004, None),
            "top1_agreement": (0.96, 0.97, None),
            "slope": 0.5,
            "slope_error": 0.1,
            "accumulates": True,
        }
        quality = example.quality_report(curves=(PositionCurve(**(fields | changes)),))
        return render(example.result(quality=quality))

    text = curve()
    assert "position in the sequence 16-63: 0.004" in text
    assert "64-255" not in text
    assert "The KL grows with position: +0.5 (standard error 0.1)" in text
    assert "by position in the sequence" not in curve(num_tokens=(600, 0, 0))


def test_slices_name_the_head_that_reaches_furthest(page):
    ratios = example.grid(0.5)
    ratios = [list(row) for row in ratios]
    ratios[2][1] = 1.75
    table = example.range_table(ratio=ratios)
    part = Slice(dimension="overall", name="all", num_tokens=example.TOKENS)
    ranges = example.range_report(slices=[RangeSlice(slice=part, k=table, v=table)])
    assert "1.75 <small>L2 H1</small>" in render(example.result(range=ranges))


def test_the_page_and_the_result_lie_side_by_side(tmp_path):
    result = example.result()
    write_report(result, tmp_path / "out.html")
    assert (tmp_path / "out.html").read_text() == render(result)
    assert ReplayResult.from_json((tmp_path / "out.json").read_bytes()) == result
    with pytest.raises(ValueError, match=r"Expected a report to end in \.html, got"):
        write_report(result, tmp_path / "out.json")


def test_the_templates_are_found_from_anywhere(tmp_path):
    code = "import fp8kv_jax.drift.report as r; print(r._template().name)"
    environment = {"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "report.html\n"


def elements(svg, tag):
    return ElementTree.fromstring(svg).findall(f".//{tag}")


def test_columns_are_as_high_as_their_values():
    def heights(values, **options):
        svg = charts.columns(
            values,
            name="n",
            labels=range(len(values)),
            axis="x",
            titles=["t"] * len(values),
            **options,
        )
        return [float(rect.get("height")) for rect in elements(svg, "rect")]

    assert heights([0, 1, 2, 4]) == [0, 37.5, 75, 150]
    # A log axis from 1e-8 to 1: each decade is an eighth.
    assert heights([0, 1e-9, 1e-8, 1e-4, 1], is_log=True) == [0, 0, 0, 75, 150]


def test_lines_lie_where_their_values_are_and_gaps_are_left_out():
    svg = charts.lines(
        [charts.Line(name="a", values=[0.9, None, 1.0])],
        name="n",
        labels=["x", "y", "z"],
        axis="p",
        lowest=0.9,
    )
    (points,) = [line.get("points").split() for line in elements(svg, "polyline")]
    heights = [float(point.split(",")[1]) for point in points]
    assert heights == [162, 12]
    assert [x.text for x in elements(svg, "title")] == ["a, p x: 0.9", "a, p z: 1"]


def test_colours_follow_values_and_inks_stay_readable():
    def light(colour):
        parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        linear = [(x / 255) ** 2.2 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colours in (charts.RATIOS, charts.SHARES, charts.ERRORS):
        low, high = colours.stops[0][0], colours.stops[-1][0]
        values = [low * (high / low) ** (i / 40) for i in range(41)]
        svg = charts.heatmap(
            [values], colours, name="n", rows=[0], title=lambda row, column: "t"
        )
        for group in elements(svg, "g"):
            back = light(group.find("rect").get("fill"))
            ink = light(group.get("fill").replace("#111", "#111111") + "f" * 3)
            contrast = (max(back, ink) + 0.05) / (min(back, ink) + 0.05)
            assert contrast > 4
    assert charts.SHARES.of(0) == charts.SHARES.of(1e-8)
    assert charts.SHARES.of(5) == charts.SHARES.of(1)
    shades = [light("#" + bytes(charts.SHARES.of(x)).hex()) for x in (1e-7, 1e-4, 1e-1)]
    assert shades == sorted(shades, reverse=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.1234, "0.123"),
        (3.1e-5, "3e-5"),
        (1234, "1.23e+03"),
        (-2e-4, "-2e-4"),
    ],
)
def test_numbers_are_short(value, text):
    assert charts.short(value) == text


def test_attributes_hold_no_unescaped_quote():
    svg = charts.legend(charts.RATIOS, 'a "b" <c>')
    assert re.search("Legend: a &#34;b&#34; &lt;c&gt;", svg)
    assert ElementTree.fromstring(svg).get("aria-label") == 'Legend: a "b" <c>'
