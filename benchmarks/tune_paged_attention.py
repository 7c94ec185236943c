"""`python -m benchmarks.tune_paged_attention [case ...]`: times candidate configs.

Prints the fastest of each case. What wins for a class of shapes goes, by hand, into
`TUNED` in `pallas_kernels/paged_attention/config.py`. About 1 s of tracing for each of
some 30 candidates; compilation runs beside it.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.rows import cold_copies, relative_error
from benchmarks.timing import device_time_us
from pallas_kernels.paged_attention.cases import BENCHMARK_CASES, Case, make_inputs
from pallas_kernels.paged_attention.config import (
    ShapeClass,
    Tuning,
    config_of,
    pick_config,
)
from pallas_kernels.paged_attention.mosaic_gpu import paged_attention_mosaic_gpu
from pallas_kernels.paged_attention.problem import Problem

# Twice the tolerance of the op's tests: both sides of the comparison have an error.
TOLERANCE = 2.0**-7
_STAGES = (2, 3, 4, 5, 6, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="case", help="default: all")
    parser.add_argument("--best", type=int, default=5, help="rows per case")
    args = parser.parse_args()
    if unknown := set(args.cases) - set(BENCHMARK_CASES):
        parser.error(f"Expected cases of {list(BENCHMARK_CASES)}, got {unknown}.")
    for name in args.cases or BENCHMARK_CASES:
        case = BENCHMARK_CASES[name]
        Console().print(_table(name, case, tune(case)[: args.best]))


def tune(case: Case) -> list[tuple[float, Tuning]]:
    """Times all candidates on the device, each checked against the first one.

    Returns:
      Device times in microseconds and what took them, fastest first.
    """
    problem = _problem_of(case)
    tunings = list(candidates(problem))
    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(lambda t: _compile(case, problem, t), tunings))
    args, arrays = make_inputs(case, 0)
    pools = cold_copies(args[1:3])
    want, times = None, []
    for tuning, attend in zip(tunings, compiled, strict=True):
        got = np.asarray(attend(*args, **arrays), np.float32)
        want = got if want is None else want
        error = relative_error(got, want)
        if not error <= TOLERANCE:
            raise AssertionError(f"{tuning} differs by {error} from {tunings[0]}.")
        calls = [
            functools.partial(attend, args[0], *pair, *args[3:], **arrays)
            for pair in pools
        ]
        times.append((device_time_us(calls), tuning))
    return sorted(times)


def candidates(problem: Problem) -> Iterator[Tuning]:
    """Gives tunings that fit, with the two largest numbers of stages that fit."""
    for pages, tiles, blocks in itertools.product((1, 2), (1, 2, 4, 8), (1, 2)):
        tunings = [Tuning(pages, tiles, n, blocks) for n in _STAGES]
        fitting = [t for t in tunings if config_of(problem, t).fits(problem, blocks)]
        yield from fitting[-2:]


def _problem_of(case: Case) -> Problem:
    (q, k_pages, _, table, _), _ = jax.eval_shape(lambda: make_inputs(case, 0))
    scale = case.head_dim**-0.5
    return Problem.of(q, k_pages, table, softmax_scale=scale, **case.options)


def _compile(case: Case, problem: Problem, tuning: Tuning) -> Callable[..., Any]:
    args, arrays = jax.eval_shape(lambda: make_inputs(case, 0))
    options = {"query_starts": None, "softmax_scale": problem.softmax_scale}
    if not case.fp8:
        options |= {"k_scale": None, "v_scale": None}
    attend = functools.partial(
        paged_attention_mosaic_gpu,
        config=config_of(problem, tuning),
        **options,
        **case.options,
    )
    return jax.jit(attend).lower(*args, **arrays).compile()


def _table(name: str, case: Case, times: list[tuple[float, Tuning]]) -> Table:
    problem = _problem_of(case)
    shape, kind = ShapeClass.of(problem), jax.devices()[0].device_kind
    picked = pick_config(problem, kind)
    table = Table("us", *Tuning._fields, "picked now", title=f"{name}, {kind}: {shape}")
    for microseconds, tuning in times:
        is_picked = config_of(problem, tuning) == picked
        row = (f"{microseconds:.2f}", *map(str, tuning), "yes" if is_picked else "")
        table.add_row(*row)
    return table


if __name__ == "__main__":
    main()
