"""Decode attention of other libraries on the same values, with their errors.

Optional: PyTorch (over contiguous BF16 K and V) and FlashInfer (over FP8 pages), each
skipped with a message where it is not installed. FlashInfer builds its kernels when
they are first called.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import turn
from benchmarks.peer_libraries import PEERS, SCALE, Call, Peer, Problem
from benchmarks.rows import (
    COLD_BYTES,
    check_error,
    implementations,
    moved,
    relative_error,
    spread,
)
from benchmarks.timing import Times, device_times, kernel_times, wall_times
from pallas_kernels.dispatch import Implementation
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import BENCHMARK_CASES, Case, make_inputs

SHAPES = ("32x8192", "8x2048", "1x8192")
REPEATS = 20

type Row = dict[str, Any]


def run(small: bool) -> Iterator[Row]:
    """Times each library, and measures its error against attention in float32.

    Args:
      small: one small case, for a machine without a GPU.

    Yields:
      One row per case and library; a row `skipped` says why there is none.
    """
    cases = {name: BENCHMARK_CASES[name] for name in SHAPES}
    if small:
        case = dataclasses.replace(BENCHMARK_CASES["8x2048"], seq_lens=(256,) * 2)
        cases = {"2x256": case}
    compiled = turn.compile_all({name: _lower(case) for name, case in cases.items()})
    for name, case in cases.items():
        problem, programs = Problem.of(case), compiled[name]
        expected = _attend(problem, jnp.float32, programs["reference"])
        yield _our_row(name, problem, expected, programs["ours"])
        for peer in PEERS:
            if peer.installed:
                yield _peer_row(name, problem, expected, peer)
    for library in sorted({peer.library for peer in PEERS if not peer.installed}):
        yield {"skipped": f"{library} is not installed"}


def _lower(case: Case) -> dict[str, Any]:
    """Lowers our attention, and the reference over queries in float32."""
    (q, *rest), _ = jax.eval_shape(lambda: make_inputs(case, 0))

    def lowered(name: Implementation, dtype: Any) -> jax.stages.Lowered:
        scales = {"k_scale": SCALE, "v_scale": SCALE}
        attend = functools.partial(paged_attention, **scales, implementation=name)
        return turn.lower(attend, jax.ShapeDtypeStruct(q.shape, dtype), *rest)

    ours = lowered(implementations()[0], jnp.bfloat16)
    return {"ours": ours, "reference": lowered("xla", jnp.float32)}


def _attend(problem: Problem, dtype: Any, program: Callable[..., Any]) -> jax.Array:
    p = problem
    q = p.q.astype(dtype)
    return program(q, p.k_pages, p.v_pages, p.block_table, p.seq_lens)[:, 0]


def _our_row(
    name: str, problem: Problem, expected: jax.Array, program: Callable[..., Any]
) -> Row:
    implementation = implementations()[0]
    calls = [
        lambda p=copy: _attend(p, jnp.bfloat16, program)
        for copy in _cold_problems(problem)
    ]
    error = relative_error(calls[0](), expected)
    check_error(error)  # a peer's is reported, whatever it is
    times = device_times(calls, repeats=REPEATS)
    return _row(name, f"ours, {implementation}", problem, times, error, itemsize=1)


def _peer_row(name: str, problem: Problem, expected: jax.Array, peer: Peer) -> Row:
    try:
        calls = [peer.prepare(copy) for copy in _cold_problems(problem)]
        error = relative_error(calls[0]().float().cpu().numpy(), expected)
        times = _peer_times(calls)
    except Exception as reason:  # a peer is optional, whatever it trips over
        first = (str(reason).splitlines() or [""])[0]
        return {"skipped": f"{peer.name} {name}: {type(reason).__name__}: {first}"}
    return _row(name, peer.name, problem, times, error, itemsize=peer.itemsize)


def _cold_problems(problem: Problem) -> list[Problem]:
    num_copies = max(1, min(16, COLD_BYTES // problem.k_pages.nbytes // 2))
    return [
        dataclasses.replace(
            problem,
            k_pages=jnp.copy(problem.k_pages),
            v_pages=jnp.copy(problem.v_pages),
        )
        for _ in range(num_copies)
    ]


def _peer_times(calls: list[Call]) -> Times:
    if jax.default_backend() != "gpu":
        return wall_times(calls, repeats=REPEATS)
    import torch

    def wait(_: Any) -> None:
        torch.cuda.synchronize()

    for call in calls:
        wait(call())
    timed = kernel_times(calls, repeats=REPEATS, wait=wait)
    return Times.of([sum(us for _, us in kernels) for kernels in timed])


def _row(
    name: str,
    implementation: str,
    problem: Problem,
    times: Times,
    error: float,
    *,
    itemsize: int,
) -> Row:
    row = {"op": "decode attention", "case": name, "implementation": implementation}
    rate = moved((*problem.num_values, itemsize), times.median)
    return row | spread(times) | rate | {"relative_error": error}
