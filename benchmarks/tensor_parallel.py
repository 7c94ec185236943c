r"""A decode step of Llama-3.1-8B's shape on one device and on several.

    python -m benchmarks.tensor_parallel             # on all GPUs of a machine
    python -m benchmarks.tensor_parallel --small     # a tiny model, anywhere

Weights are random. Each step is compared with that of one device over the same pools
before it is timed. Times are wall time of decode steps in a running loop, and of a
sum over the devices like those between the layers, 64 in a chain.
"""

import argparse
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import fp8kv_jax as fp8kv
from benchmarks import llama_step, timing
from benchmarks.llama_step import StepShape
from benchmarks.rows import relative_error
from fp8kv_jax.parallel import KV_HEADS, QUERIES, Placement
from models.config import ModelConfig
from models.sharding import shard_params

_CHAIN = 64
_COLLECTIVE = r" (?:all-\w+|collective-permute|reduce-scatter)(?:-start)?\("
# Of a step's logits, in norm: sums in another order round to other BF16 values in 32
# random layers. Heads or columns in a wrong place would differ by 1 or more.
_TOLERANCE = 0.1


class _Variant(NamedTuple):
    name: str
    forward: Any
    params: Any
    placement: Placement | None


def variants(model: ModelConfig, num_devices: int) -> list[_Variant]:
    """The step of one device, with projections joined and apart, and of all."""
    placement = fp8kv.place(
        Mesh(np.array(jax.devices()[:num_devices]), ("tensor",)), model.num_kv_heads
    )
    forward, params = llama_step.random_params(model, fused=False)
    split = shard_params(model, params, placement)
    return [
        _Variant("one device", forward, params, None),
        _Variant(
            "one device, fused", *llama_step.random_params(model, fused=True), None
        ),
        _Variant(f"{num_devices} devices", forward, split, placement),
    ]


def lower(variant: _Variant, shape: StepShape) -> jax.stages.Lowered:
    """Lowers the step without a window."""
    placement = variant.placement

    def made() -> Any:
        state = replace(llama_step.calibrating_state(shape), staged=None)
        return fp8kv.init_cache(shape.cache), state

    trees = *jax.eval_shape(made), llama_step.decode_batch(shape)
    if placement is not None:
        trees = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            trees,
            placement.shardings(trees),
        )
    step = fp8kv.make_steps(variant.forward, placement=placement).decode_step
    return jax.jit(step, donate_argnums=(1, 2)).lower(variant.params, *trees)


def measure(
    variant: _Variant, shape: StepShape, step: jax.stages.Compiled
) -> tuple[np.ndarray, dict[str, Any]]:
    """Runs and times a step: its first logits, and a row."""
    state = replace(llama_step.frozen_state(shape), staged=None)
    trees = llama_step.full_cache(shape), state, llama_step.decode_batch(shape)
    if variant.placement is not None:
        trees = variant.placement.put(trees)
    *kept, batch = trees
    del trees, state

    def call() -> jax.Array:
        logits, *kept[:] = step(variant.params, *kept, batch)
        return logits

    logits = np.asarray(call(), np.float32)
    timing.warm_up([call] * 2)
    times = timing.steady_times(call)
    return logits, {
        "step": variant.name,
        "case": shape.name,
        "ms": [round(us / 1e3, 3) for us in times[:3]],
        "collectives": len(re.findall(_COLLECTIVE, step.as_text())),
    }


def sum_time_us(placement: Placement, num_rows: int, width: int) -> float:
    """Microseconds of one sum of `[num_rows, width]` in BF16 over the devices."""

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(_CHAIN):  # halved in between, lest XLA joins the sums
            x = jax.lax.psum(x, (KV_HEADS, QUERIES)) * jnp.bfloat16(0.5)
        return x

    whole = PartitionSpec()
    spread = jax.shard_map(
        chain, mesh=placement.mesh, in_specs=whole, out_specs=whole, check_vma=False
    )
    x = placement.put_replicated(np.ones((num_rows, width), jnp.bfloat16))
    run: Callable[[Any], Any] = jax.jit(spread)
    timing.warm_up([lambda: run(x)] * 2)
    return timing.steady_times(lambda: run(x)).median / _CHAIN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, help="all by default")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    options = parser.parse_args()
    num_devices = options.devices or len(jax.devices())
    device = jax.devices()[0]
    print(f"{num_devices} x {device.device_kind}, jax {jax.__version__}", flush=True)
    sizes: dict[str, int] = {}
    if options.small:
        sizes = {"num_layers": 2, "hidden_size": 256, "num_q_heads": 8}
        sizes |= {"num_kv_heads": 2, "intermediate_size": 512, "vocab_size": 1024}
    model = llama_step.llama_config(**sizes)
    runs = variants(model, num_devices)
    cases = [(4, 256)] if options.small else [(64, 8192), (16, 2048)]
    shapes = [StepShape(model=model, num_seqs=a, seq_len=b) for a, b in cases]
    # One after the other into the threads: lowering runs in Python.
    steps: list[list[Future]] = []
    with ThreadPoolExecutor(len(shapes) * len(runs)) as pool:
        for shape in shapes:
            lowered = [lower(variant, shape) for variant in runs]
            steps.append([pool.submit(x.compile) for x in lowered])
        for shape, futures in zip(shapes, steps, strict=True):
            report(runs, shape, [future.result() for future in futures])
    placement = runs[-1].placement
    assert placement is not None
    for shape in shapes:
        us = sum_time_us(placement, shape.num_seqs, model.hidden_size)
        row = {"sum": [shape.num_seqs, model.hidden_size], "us": round(us, 1)}
        print(json.dumps(row), flush=True)


def report(
    runs: list[_Variant], shape: StepShape, steps: list[jax.stages.Compiled]
) -> None:
    """Measures the steps of one shape and prints a line of JSON for each."""
    expected = None
    for variant, step in zip(runs, steps, strict=True):
        logits, row = measure(variant, shape, step)
        # Weights of a fused model are drawn anew.
        if variant.params["layers"][0]["attention"].keys() >= {"q"}:
            expected = logits if expected is None else expected
            error = relative_error(logits, expected)
            row["logits_differ"] = float(f"{error:.2g}")
            if not error <= _TOLERANCE:
                raise SystemExit(
                    f"{variant.name}, {shape.name}: logits differ by {error:.3g} in "
                    f"norm, more than {_TOLERANCE}."
                )
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
