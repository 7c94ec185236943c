"""Reports of benchmarks: written, read, compared, drawn, and made by the command."""

import dataclasses
import itertools
import multiprocessing
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from benchmarks import plots, side_by_side, suite, tables, timing
from benchmarks.__main__ import app
from benchmarks.compare import compare
from benchmarks.report import Report, ReportError, derived, read_report, write_report
from benchmarks.timing import Ceilings, Times, kernel_times


def row(case="a", us=100.0, *, implementation="mosaic_gpu", **more):
    names = {"benchmark": "b", "op": "read", "case": case}
    return names | {"implementation": implementation, "device_us": us} | more


def report(*rows, **changes):
    fields = {
        "device": "Some GPU",
        "driver": "1.2",
        "versions": {"jax": "9.9"},
        "commit": "abc",
        "date": "2030-01-02T03:04:05+00:00",
        "small": False,
        "ceilings": {"gb_per_s": 4000.0, "tflop_per_s": 700.0},
        "rows": list(rows),
    }
    return Report(**(fields | changes))


def test_a_report_survives_json(tmp_path):
    old = report(row(gb_per_s=1000.5), skipped=["x: y"], seconds={"b": 1.5})
    write_report(old, tmp_path / "r.json")
    assert read_report(tmp_path / "r.json") == old
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version": 99}', '{"version": 1, "device": "x"}', "\xff"],
)
def test_a_file_that_is_no_report_is_refused(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ReportError, match=r"Expected .*report"):
        read_report(path)


def test_only_what_became_slower_than_the_threshold_is_a_regression():
    old = report(row("same"), row("faster"), row("noisy"), row("slower"), row("gone"))
    new = report(
        row("same"),
        row("faster", 50),
        row("noisy", 109),
        row("slower", 120),
        row("new"),
    )
    comparison = compare(old, new)
    (slower,) = comparison.regressions(1.1)
    assert (slower.case, slower.ratio) == ("slower", 1.2)
    assert comparison.missing == [("b", "read", "gone", "mosaic_gpu")]


def test_a_run_by_name_is_compared_by_name():
    old = report(row(), row() | {"benchmark": "other"})
    assert compare(old, report(row())).missing == []


@pytest.mark.parametrize("changes", [{"device": "Other GPU"}, {"small": True}])
def test_runs_on_other_devices_or_shapes_are_not_compared(changes):
    with pytest.raises(ReportError, match="one kind of device"):
        compare(report(row()), report(row(), **changes))


def test_ratios_are_to_the_baselines_of_the_same_case():
    rows = derived(
        report(
            row("a", 100, gb_per_s=3000.0),
            row("a", 250, implementation="xla"),
            row("a-bf16", 190),
            row("b", 10, tflop_per_s=350.0),
        )
    )
    assert rows[0]["percent_of_ceiling"] == 75
    assert rows[0]["times_xla"] == 2.5
    assert rows[0]["times_bf16"] == 1.9
    assert rows[3]["percent_of_ceiling"] == 50
    assert "times_xla" not in rows[1]
    assert not {"times_xla", "times_bf16"} & set(rows[3])


def test_markdown_is_made_from_the_report():
    spread = {"p10_us": 120.0, "p90_us": 130.0, "samples": 20}
    text = tables.markdown(
        report(row("a", 123.4, **spread, gb_per_s=3000.0), row("b", 2))
    )
    assert "| read | a | mosaic_gpu | 123.4 | 120.0 to 130.0 | 3,000 | 75 |" in text
    assert "Some GPU, driver 1.2, jax 9.9, commit abc, 2030-01-02" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1


def test_plots_are_drawn_for_what_was_measured(tmp_path):
    points = [
        row(f"{n}x{t}", n * t, gb_per_s=1000.0, us_per_token=t, num_seqs=n, context=t)
        | {"benchmark": "scaling"}
        for n, t in itertools.product((1, 8), (1024, 8192))
    ]
    written = plots.write_plots(report(*points), tmp_path)
    assert [path.stem for path in written] == [
        "time_against_context",
        "percent_of_ceiling",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert plots.write_plots(report(row()), tmp_path) == []


def test_the_ceiling_plot_never_shows_another_library_as_ours():
    def measured(case, implementation, percent):
        return row(case, implementation=implementation) | {
            "percent_of_ceiling": percent
        }

    rows = [
        measured("a", "ours, mosaic_gpu", 90.0),
        measured("a", "torch", 99.0),
        measured("b", "mosaic_gpu", 80.0),
        measured("b", "xla", 85.0),
        measured("c", "xla", 70.0),
    ]
    (axes,) = plots._percent(rows).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["read  a", "read  a  torch", "read  b", "read  c"]
    assert [bar.get_width() for bar in axes.patches] == [90.0, 99.0, 80.0, 70.0]


def test_times_are_a_median_and_its_spread():
    times = Times.of(list(range(101)))
    assert times == (50.0, 10.0, 90.0, 101)


@pytest.mark.parametrize("kernels_of_calls", [[2, 2], [2, 3]])
def test_kernels_are_told_apart_by_call(monkeypatch, kernels_of_calls):
    seen = []
    calls = [
        lambda n=n: seen.extend((f"kernel{n}", 1.0) for _ in range(n))
        for n in kernels_of_calls
    ]

    def session(calls, wait=None):
        assert len(calls) <= 2, "more than MAX_KERNELS in a session"
        seen.clear()
        for call in calls:
            call()
        return list(seen)

    monkeypatch.setattr("benchmarks.timing.kernels_of", session)
    monkeypatch.setattr("benchmarks.timing.MAX_KERNELS", 5)
    timed = kernel_times(calls, repeats=4)
    assert [len(kernels) for kernels in timed] == 2 * kernels_of_calls


@pytest.fixture
def benchmarks_of(monkeypatch):
    """Puts functions in the place of benchmarks, on a device that needs no measuring."""

    def put(**runs):
        ceilings = Ceilings(gb_per_s=1.0, tflop_per_s=1.0)
        monkeypatch.setattr(suite, "measure_ceilings", lambda: ceilings)
        monkeypatch.setattr(suite, "load", runs.get)

    return put


def test_a_failing_benchmark_is_reported_and_the_next_one_runs(benchmarks_of):
    def broken(small):
        yield row()
        raise AssertionError("3 elements differ")

    def fine(small):
        return [row("fine"), {"skipped": "nothing installed"}]

    benchmarks_of(broken=broken, fine=fine)
    result = suite.run(["broken", "fine"], small=True)
    assert result.failed == ["broken: AssertionError: 3 elements differ"]
    assert result.skipped == ["fine: nothing installed"]
    assert [r["case"] for r in result.rows] == ["a", "fine"]


def test_no_case_is_started_once_the_seconds_are_used_up(benchmarks_of, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(suite.time, "monotonic", lambda: next(clock))

    def endless(small):
        return (row(str(index)) for index in itertools.count())

    benchmarks_of(endless=endless, other=endless)
    result = suite.run(["endless", "other"], small=True, seconds=5)
    assert 1 <= len(result.rows) <= 5
    assert [reason.split(":")[0] for reason in result.skipped] == ["endless", "other"]


def test_each_row_is_kept_before_the_next_one_is_measured(benchmarks_of):
    kept = []

    def dies(small):
        assert [r["case"] for r in kept[-1].rows] == ["first"]
        yield row("second")
        assert [r["case"] for r in kept[-1].rows] == ["first", "second"]
        raise KeyboardInterrupt

    benchmarks_of(first=lambda small: [row("first")], dies=dies)
    with pytest.raises(KeyboardInterrupt):
        suite.run(["first", "dies"], small=True, keep=kept.append)


def run_side_by_side(benchmarks_of, names, **options):
    benchmarks_of()  # no measuring of this device
    return suite.run(names, small=True, runner=side_by_side.run, **options)


def test_side_by_side_gives_what_one_process_gives():
    names, said = ["pages", "absmax"], []
    result = suite.run(
        names,
        small=True,
        progress=said.append,
        begin=side_by_side.begin,
        runner=side_by_side.run,
    )
    alone = [
        (name, r["op"], r["case"], r["implementation"])
        for name in names
        for r in suite.load(name)(small=True)
    ]
    measured = [
        tuple(r[k] for k in ("benchmark", "op", "case", "implementation"))
        for r in result.rows
    ]
    assert sorted(measured) == sorted(alone)
    assert [key for key, _ in itertools.groupby(r[0] for r in measured)] == list(
        result.seconds
    ), "one measured while the other one did"
    assert not result.failed + result.skipped
    assert result.ceilings["gb_per_s"] > 0
    assert any("lowering: pages" in text for text in said)


def test_a_process_that_dies_has_failed_and_the_rows_before_are_kept(benchmarks_of):
    kept = []

    def kill_after_the_first_row(report):
        kept.append(len(report.rows))
        if kept == [1]:  # the next one takes it seconds
            (process,) = multiprocessing.active_children()
            process.kill()

    result = run_side_by_side(
        benchmarks_of, ["decode_step"], keep=kill_after_the_first_row
    )
    assert [r["benchmark"] for r in result.rows] == ["decode_step"]
    assert result.failed == ["decode_step: its process ended with exit code -9"]
    assert list(result.seconds) == ["decode_step"]


def test_an_interrupted_run_leaves_no_process(benchmarks_of):
    def interrupt(report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_side_by_side(benchmarks_of, ["absmax", "pages"], keep=interrupt)
    for process in multiprocessing.active_children():
        process.join(timeout=10)
    assert not multiprocessing.active_children()


def test_who_waits_past_the_seconds_is_skipped(benchmarks_of):
    result = run_side_by_side(benchmarks_of, ["absmax", "pages"], seconds=0.0)
    assert sorted(result.skipped) == [
        "absmax: --seconds were used up",
        "pages: --seconds were used up",
    ]
    assert not result.rows + result.failed


def test_a_steady_loop_waits_for_a_result_while_later_calls_run(monkeypatch):
    started, waited = itertools.count(), []
    latest = []

    def call():
        latest.append(next(started))
        return latest[-1]

    def wait(index):
        waited.append((index, latest[-1] - index))

    monkeypatch.setattr(timing.jax, "block_until_ready", wait)
    times = timing.steady_times(call, repeats=5, in_flight=2)
    assert times.count == 5
    assert waited == [(index, 2) for index in range(6)]


def command(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_measures_compares_and_fails_on_a_regression(tmp_path):
    path = tmp_path / "new.json"
    done = command("absmax", "--small", "--json", path, "--plot", tmp_path)
    assert done.exit_code == 0, done.output
    assert "absmax" in done.stdout
    assert (tmp_path / "percent_of_ceiling.png").exists()
    measured = read_report(path)
    assert {"jax", "python"} <= set(measured.versions)
    assert all(row["samples"] >= 20 for row in measured.rows)

    rows = [dict(row) for row in measured.rows]
    rows[0]["device_us"] /= 2
    write_report(dataclasses.replace(measured, rows=rows), tmp_path / "old.json")
    done = command("--load", path, "--compare", tmp_path / "old.json", "--markdown")
    assert done.exit_code == 1
    assert f"1 of {len(rows)} results are slower" in done.stderr
    assert done.stdout.startswith(measured.device)


def test_the_command_runs_as_a_module():
    listed = [sys.executable, "-m", "benchmarks", "--help"]
    done = subprocess.run(listed, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "decode_step" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "Expected names among .*absmax.*, got nonsense"),
        (["--compare", "missing.json"], "Expected a report of ours in missing.json"),
        (["--json", "no/such/folder.json"], "Expected a folder to write"),
        (["--plot", "x"], "Expected matplotlib for --plot: install the plot extra"),
    ],
)
def test_wrong_options_are_one_line(monkeypatch, arguments, message):
    monkeypatch.setattr(plots, "matplotlib_is_there", lambda: False)
    done = command(*arguments)
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert re.search(message, done.stderr)
