"""Device time of chunked prefill over paged pools, against cuDNN on contiguous BF16."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import turn
from benchmarks.rows import (
    Programs,
    check_error,
    implementations,
    lower_each,
    relative_error,
)
from benchmarks.timing import device_time_us
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import Case, make_inputs
from pallas_kernels.paged_attention.prefill_cases import PREFILL_BENCHMARK_CASES


def run(small: bool) -> Iterator[dict[str, Any]]:
    """Checks each case against the reference, then times it, and cuDNN beside it.

    Args:
      small: one small case, for a machine without a GPU.

    Yields:
      One row per case, and one per way to call cuDNN and number of cached tokens.
    """
    cases = PREFILL_BENCHMARK_CASES
    if small:
        case = dataclasses.replace(cases["2048+0"], num_queries=64, seq_lens=(192,))
        cases = {"64+128": case}
    on_gpu = "mosaic_gpu" in implementations()
    lowered = {label: _lower(case) for label, case in cases.items()}
    # Cases that differ in their pools alone are the same to cuDNN.
    baselines = {_sizes(case): (label, case) for label, case in [*cases.items()][::-1]}
    cudnn = {sizes: _lower_cudnn(*sizes) for sizes in baselines} if on_gpu else {}
    compiled, cudnn = turn.compile_all((lowered, cudnn))
    fastest = {}
    for sizes, programs in cudnn.items():
        label, case = baselines[sizes]
        rows = _cudnn_rows(label, case, programs)
        yield from rows
        fastest[sizes] = min(row["device_us"] for row in rows)
    for label, case in cases.items():
        row = _row(label, case, compiled[label])
        if on_gpu:
            row["ratio_to_cudnn"] = row["device_us"] / fastest[_sizes(case)]
        yield row


def _lower(case: Case) -> Programs:
    args, scales = jax.eval_shape(lambda: make_inputs(case, 0))

    def attend(name, scales, *args):
        return paged_attention(*args, **scales, **case.options, implementation=name)

    return lower_each(attend, scales, *args)


def _row(label: str, case: Case, programs: Programs) -> dict[str, Any]:
    args, scales = make_inputs(case, 0)
    name = implementations()[0]
    want = np.asarray(programs["xla"](scales, *args))
    error = relative_error(programs[name](scales, *args), want)
    check_error(error)
    attend = functools.partial(programs[name], scales, *args)
    row = _timed(label, name, [attend], _flops(case))
    return row | {"relative_error": error}


def _sizes(case: Case) -> tuple[int, ...]:
    """What cuDNN's calls depend on: queries, tokens, heads, head_dim."""
    heads = case.num_q_heads, case.num_kv_heads
    return (case.num_queries, case.seq_lens[0], *heads, case.head_dim)


def _lower_cudnn(
    num_queries: int, num_tokens: int, num_q_heads: int, num_kv_heads: int, dim: int
) -> dict[str, Any]:
    """Lowers calls of cuDNN on BF16 queries, keys and values.

    Its causal mask starts at the first key. Behind a prefix the same result takes a
    mask of its own, which is slow. So two bounds on cuDNN's best are timed beside it:
    all keys without a mask, and the prefix without and the chunk with one, unmerged.
    """
    prefix = num_tokens - num_queries

    def rows(length: int, num_heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, length, num_heads, dim), jnp.bfloat16)

    q = rows(num_queries, num_q_heads)
    whole, before, chunk = (
        (q, rows(length, num_kv_heads), rows(length, num_kv_heads))
        for length in (num_tokens, prefix, num_queries)
    )
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    causal = functools.partial(attend, is_causal=True)

    def masked(mask, q, k, v):
        return attend(q, k, v, mask=mask)

    lowered = {"causal": turn.lower(causal, *chunk)}
    if prefix:
        mask = jax.eval_shape(lambda: _causal_mask(num_queries, num_tokens))
        lowered["masked"] = turn.lower(masked, mask, *whole)
        lowered["unmasked"] = turn.lower(attend, *whole)
        lowered["prefix"] = turn.lower(attend, *before)
    return lowered


def _cudnn_rows(
    label: str, case: Case, programs: dict[str, Any]
) -> list[dict[str, Any]]:
    prefix = case.seq_lens[0] - case.num_queries
    shape = (1, case.seq_lens[0], case.num_kv_heads, case.head_dim)
    k, v = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in (1, 2))
    shape = (1, case.num_queries, case.num_q_heads, case.head_dim)
    q = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    causal, plain = programs["causal"], programs.get("prefix")
    if plain is None:
        return [_timed(label, "cudnn", [lambda: causal(q, k, v)], _flops(case))]
    chunk = (q, k[:, prefix:], v[:, prefix:])
    before = (q, k[:, :prefix], v[:, :prefix])
    mask = _causal_mask(case.num_queries, case.seq_lens[0])
    calls: dict[str, Callable[[], Any]] = {
        "cudnn mask": lambda: programs["masked"](mask, q, k, v),
        "cudnn unmasked": lambda: programs["unmasked"](q, k, v),
        "cudnn in two parts": lambda: (plain(*before), causal(*chunk)),
    }
    return [_timed(label, name, [f], _flops(case)) for name, f in calls.items()]


def _causal_mask(num_queries: int, num_tokens: int) -> jax.Array:
    """Says which tokens the last of them, the queries, see."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    return (token[None, :] <= token[num_tokens - num_queries :, None])[None, None]


def _flops(case: Case) -> int:
    """Counts multiplications and additions of both products, over what is seen."""
    queries, prefix = case.num_queries, case.seq_lens[0] - case.num_queries
    seen = queries * prefix + queries * (queries + 1) // 2
    return 4 * case.num_q_heads * case.head_dim * seen


def _timed(
    label: str, name: str, calls: list[Callable[[], Any]], flops: int
) -> dict[str, Any]:
    microseconds = device_time_us(calls, repeats=20 if name != "xla" else 4)
    return {
        "op": "paged_prefill",
        "case": label,
        "implementation": name,
        "device_us": microseconds,
        "flops": flops,
        "tflop_per_s": flops / microseconds / 1e6,
    }
