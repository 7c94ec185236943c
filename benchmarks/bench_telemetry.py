"""Device time that telemetry adds to a step: appends and attention of all layers.

The model is left out, so that what telemetry costs is a difference of two times that
are not much larger than itself.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fp8kv_jax as fp8kv
from benchmarks.timing import device_time_us

# Llama 3.1 8B in decode; and a chunk of prefill, which is counted by layer.
SHAPES = {
    "decode 32 seqs x 4,096": (32, 32, 1, 4096),
    "prefill 1 seq x 2,048": (32, 1, 2048, 2048),
}
SMALL = {"decode 2 seqs x 64": (2, 2, 1, 64)}


def run(small: bool) -> list[dict[str, Any]]:
    """Times a step without and with telemetry.

    Args:
      small: a small shape, for a machine without a GPU.

    Returns:
      one row per shape, without and with.
    """
    rows = []
    for case, shape in (SMALL if small else SHAPES).items():
        for telemetry in (False, True):
            call = _Loop(*shape, telemetry=telemetry)
            rows.append(
                {
                    "op": "step" + " with telemetry" * telemetry,
                    "case": case,
                    "implementation": "best",
                    "device_us": device_time_us([call], repeats=10),
                }
            )
    return rows


class _Loop:
    """Steps of `num_queries` tokens at the end of full sequences, scales frozen."""

    def __init__(
        self,
        num_layers: int,
        num_seqs: int,
        num_queries: int,
        seq_len: int,
        *,
        telemetry: bool,
    ) -> None:
        page_size = 128 if seq_len >= 128 else 64
        pages = -(-seq_len // page_size)
        config = fp8kv.CacheConfig(
            num_layers=num_layers,
            num_kv_heads=8,
            head_dim=128,
            num_pages=num_seqs * pages,
            page_size=page_size,
        )
        state = fp8kv.init_calibration(
            fp8kv.CalibrationConfig(window_tokens=1),
            config,
            max_tokens_per_step=num_seqs * num_queries,
            telemetry=telemetry,
        )
        self.cache = fp8kv.init_cache(config)
        table = np.arange(num_seqs * pages, dtype=np.int32).reshape(num_seqs, pages)
        positions = np.arange(seq_len - num_queries, seq_len)
        slots = table[:, positions // page_size] * page_size + positions % page_size
        self.batch = fp8kv.Batch(
            token_ids=jnp.zeros((num_seqs, num_queries), jnp.int32),
            slot_mapping=jnp.asarray(slots, jnp.int32),
            query_starts=jnp.full((num_seqs,), seq_len - num_queries, jnp.int32),
            seq_lens=jnp.full((num_seqs,), seq_len, jnp.int32),
            block_table=jnp.asarray(table),
        )
        keys = jax.random.split(jax.random.key(0), 3)
        shape = num_layers, num_seqs, num_queries
        normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
        self.q = normal(keys[0], (*shape, 32, 128))
        self.k, self.v = (normal(key, (*shape, 8, 128)) for key in keys[1:])
        self.q, self.k, self.v = (tuple(x) for x in (self.q, self.k, self.v))
        args = self.cache, state, self.batch, self.q, self.k, self.v
        self.step = jax.jit(_step, donate_argnums=(0, 1)).lower(*args).compile()
        _, self.cache, self.state = self.step(*args)

    def __call__(self) -> Any:
        outs, self.cache, self.state = self.step(
            self.cache, self.state, self.batch, self.q, self.k, self.v
        )
        return outs


def _step(cache, state, batch, q, k, v):
    step = fp8kv.begin_step(cache, state, batch)
    outs = []
    for layer in range(len(q)):
        out, step = fp8kv.attend(step, layer, q[layer], k[layer], v[layer])
        outs.append(out)
    return outs, *fp8kv.end_step(step)
