"""`fp8kv sweep`: its JSON, table, files, and what goes wrong in one line."""

import csv
import functools
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from sweep_examples import SLICE

from fp8kv_jax.drift.trace import open_trace

TINY = Path(__file__).parents[2] / "models" / "data" / "tiny_llama"
ORDER = "probe,chat,code,more_code"


@pytest.fixture
def cli(command_line):
    return functools.partial(command_line, "sweep")


def test_json_names_the_layer_that_a_probe_clips(cli_json):
    result = cli_json("--trace", SLICE, "--order", ORDER, "--windows", "30,100")
    probe, longer = result["settings"]
    assert (probe["window"], longer["window"]) == (30, 100)
    assert probe["order"] == ORDER.split(",")
    assert (probe["granularity"], probe["headroom"]) == ("tensor", 2.0)
    assert (probe["frozen_at"], longer["frozen_at"]) == (30, 106)
    assert probe["saturated"] == {"k": [0], "v": [2]}
    assert longer["saturated"] == {"k": [0], "v": [0]}
    assert probe["quality"] is None
    seen = np.abs(open_trace(SLICE).rows("probe", 0, 30)[1].astype(np.float32)).max()
    assert np.float32(probe["v_scale"][0]) == seen * np.float32(2 / 448)


def test_head_scales_are_lists_by_layer(cli_json):
    result = cli_json("--trace", SLICE, "--granularity", "head,tensor")
    scales = [np.shape(setting["k_scale"]) for setting in result["settings"]]
    assert set(scales) == {(1, 2), (1,)}


def test_classes_that_no_order_names_are_reported_as_held_out(cli_json):
    flags = ("--order", "probe,*", "--held-out", "more_code", "--windows", 30)
    (setting,) = cli_json("--trace", SLICE, *flags)["settings"]
    assert list(setting["held_out"]) == ["more_code"]
    # One of the two values that the probe's scale clips is in code, one held out.
    assert setting["held_out"]["more_code"]["saturated"]["v"] == [1]
    assert setting["saturated"]["v"] == [1]


def test_table_names_what_varies_once_and_the_rest_in_its_title(cli):
    orders = ("--order", "probe,chat", "--order", "code")
    code, out, err = cli("--trace", SLICE, *orders, "--windows", "30,32")
    assert (code, out) == (0, "")
    assert "chunk 64, granularity tensor, headroom 2, rule amax" in err
    assert err.count("probe chat") == 1
    assert "4 settings over 154 tokens of 4 texts" in err
    assert max(map(len, err.splitlines())) <= 80


def test_csv_has_a_row_for_each_setting(cli, tmp_path):
    path = tmp_path / "s.csv"
    code, _, err = cli(
        "--trace", SLICE, "--order", ORDER, "--windows", "1,30", "--csv", path
    )
    assert code == 0, err
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["window"] for row in rows] == ["1", "30"]
    assert rows[1]["v_saturated"] == "2"
    assert rows[1]["worst"] == "V0"
    # 30 - 1 + 64 rows of K and V, 2 heads of 128 BF16 each
    assert rows[1]["staged_bytes"] == str(93 * 2 * 2 * 128 * 2)


def test_plots_are_png_files(cli, tmp_path):
    code, _, err = cli("--trace", SLICE, "--plots", tmp_path / "p", "--chunk", "1,64")
    assert code == 0, err
    found = {path.name: path.read_bytes() for path in (tmp_path / "p").iterdir()}
    assert set(found) == {
        "scale_against_window.png",
        "saturation_against_window.png",
        "memory_against_window.png",
    }
    assert all(data.startswith(b"\x89PNG") for data in found.values())


def test_a_model_records_its_text_and_is_measured(cli_json, tmp_path):
    (tmp_path / "a.txt").write_text("one two three " * 40)
    (tmp_path / "b.txt").write_text("four, five; six! " * 40)
    trace = tmp_path / "t"
    data = ("--data", f"a={tmp_path / 'a.txt'}", "--data", f"b={tmp_path / 'b.txt'}")
    limits = ("--num-samples", 4, "--max-seq-len", 48, "--quality-tokens", 60)
    grid = ("--order", "a", "--windows", "1,40", "--chunk", 8)
    plots = ("--plots", tmp_path / "plots")
    result = cli_json("--model", TINY, *data, *limits, *grid, *plots, "--record", trace)
    assert {name.split("/")[0] for name in result["trace"]["texts"]} == {"a", "b"}
    for setting in result["settings"]:
        # Held-out text, because there is some.
        assert set(setting["quality"]) == {"b", "all"}
        assert setting["quality"]["all"]["num_tokens"] == 60
        assert 0 <= setting["quality"]["all"]["kl"] < 1
    assert (tmp_path / "plots" / "quality_against_window.png").is_file()
    again = cli_json("--trace", trace, *grid)
    for one, other in zip(result["settings"], again["settings"], strict=True):
        assert one["k_scale"] == other["k_scale"]


def write_probe(folder):
    (folder / "a.txt").write_text("one two three")
    return folder / "a.txt"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Expected --trace FILE, a recorded K/V trace, or --data PATH"),
        (("--trace", SLICE, "--data", SLICE), "and not both"),
        (("--trace", SLICE, "--record", "x"), "Expected --data beside --record"),
        (("--trace", "none"), "Expected none to be a K/V trace, found no such file"),
        (("--trace", SLICE, "--windows", "1,x"), "--windows to be whole numbers"),
        (("--trace", SLICE, "--windows", "1,,2"), "--windows to be whole numbers"),
        (("--trace", SLICE, "--windows", "5000"), "windows of 1 to 4096 tokens"),
        (("--trace", SLICE, "--headroom", "two"), "--headroom to be numbers"),
        (("--trace", SLICE, "--order", "a"), "--order to name the classes of the"),
        (("--trace", SLICE, "--order-seeds", "x"), "--order-seeds to be whole"),
        (("--trace", SLICE, "--quality-settings", "9"), "of 0 to 8, got 9"),
        (("--trace", SLICE, "--quality-tokens", "0"), "--quality-tokens of at least 1"),
        (("--trace", SLICE, "--csv", "/none/x.csv"), "Expected to write"),
        (("--trace", SLICE, "--model", TINY), r"the model of the trace, with layers"),
    ],
)
def test_what_is_wrong_is_one_line(cli, arguments, message):
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("fp8kv: error: ")
    assert err.count("\n") == 1


def test_a_class_name_that_no_order_can_name_is_refused(cli, tmp_path):
    code, _, err = cli("--model", TINY, "--data", f"a,b={write_probe(tmp_path)}")
    assert code == 2
    assert "names of --data without / , and *, got 'a,b'" in err


def test_without_matplotlib_plots_are_refused_before_anything_runs(cli, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find(name, *rest),
    )
    code, _, err = cli("--trace", "none", "--plots", "p")
    assert code == 2
    assert "Expected matplotlib for --plots" in err
    assert "`plot` extra" in err


def test_a_window_that_nothing_fills_is_not_measured(cli_json, tmp_path, capsys):
    data = ("--data", f"a={write_probe(tmp_path)}")
    result = cli_json("--model", TINY, *data, "--windows", "4096")
    (setting,) = result["settings"]
    assert setting["frozen_at"] is setting["quality"] is None
    assert setting["k_scale"] == [2.0, 2.0]
