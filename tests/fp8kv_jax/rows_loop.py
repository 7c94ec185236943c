"""A loop that writes given rows through the real step, with the oracle beside it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from oracle import SlotOracle

import fp8kv_jax as fp8kv
from fp8kv_jax import counters
from fp8kv_jax.calibration import FROZEN, PROVISIONAL


@functools.partial(jax.jit, donate_argnums=(0, 1), static_argnums=6)
def write(cache, calibration, batch, q, k, v, implementation=None):
    """One step over rows [layers, num_seqs, num_queries, heads, dim]."""
    options = {"implementation": implementation}
    step = fp8kv.begin_step(cache, calibration, batch, **options)
    outs = []
    for layer in range(cache.num_layers):
        out, step = fp8kv.attend(step, layer, q[layer], k[layer], v[layer], **options)
        outs.append(out)
    return outs, *fp8kv.end_step(step, **options)


def normal(num_tokens, scale=1.0, seed=0, heads=2, dim=16):
    """Rows that BF16 holds, as float32 [num_tokens, heads, dim]."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, scale, (num_tokens, heads, dim)).astype(jnp.bfloat16)
    return rows.astype(np.float32)


class RowsLoop:
    """One sequence over a pool; rows come as [layers, num_tokens, heads, dim]."""

    def __init__(self, *, chunk=16, cache=None, implementation=None, **calibration):
        sizes = {
            "num_layers": 1,
            "num_kv_heads": 2,
            "head_dim": 16,
            "num_pages": 8,
            "page_size": 8,
        }
        self.config = fp8kv.CacheConfig(**(sizes | (cache or {})))
        self.chunk = chunk
        self.implementation = implementation
        self.cache = fp8kv.init_cache(self.config)
        self.state = fp8kv.init_calibration(
            fp8kv.CalibrationConfig(**calibration),
            self.config,
            max_tokens_per_step=chunk,
        )
        self.oracle = SlotOracle(
            self.config.num_layers,
            self.config.num_slots,
            self.config.num_kv_heads,
            self.config.head_dim,
        )
        self.next_slot = 0

    def write(self, k, v=None, *, q=None, slots=None, copies=None, seq_len=None):
        """Writes up to `chunk` rows; the next slots in order unless named.

        Returns the attention output of the step, [layers, num_tokens, heads, dim].
        """
        k = self._rows(k)
        v = k if v is None else self._rows(v)
        num = k.shape[1]
        if slots is None:
            slots = np.arange(self.next_slot, self.next_slot + num)
            self.next_slot += num
        slots = np.asarray(slots, np.int32)
        seq_len = self.next_slot if seq_len is None else seq_len
        copies = np.zeros((0, 2)) if copies is None else np.asarray(copies)

        def pad(x, value=0.0):
            width = [(0, 0)] * x.ndim
            width[-1 if x.ndim == 1 else 1] = (0, self.chunk - num)
            return np.pad(x, width, constant_values=value)

        batch = fp8kv.Batch(
            token_ids=jnp.zeros((1, self.chunk), jnp.int32),
            slot_mapping=jnp.asarray(pad(slots, -1))[None],
            query_starts=jnp.array([seq_len - num], jnp.int32),
            seq_lens=jnp.array([seq_len], jnp.int32),
            block_table=jnp.arange(self.config.num_pages, dtype=jnp.int32)[None],
            page_copies=jnp.asarray(copies, jnp.int32),
        )
        q = np.zeros_like(k) if q is None else self._rows(q)
        padded = [jnp.asarray(pad(x))[:, None] for x in (q, k, v)]
        was_frozen = bool(self.state.frozen)
        outs, self.cache, self.state = write(
            self.cache, self.state, batch, *padded, self.implementation
        )
        self.oracle.copy_pages(copies.astype(int), self.config.page_size)
        self.oracle.append(slots, np.stack([k, v], axis=1), observe=not was_frozen)
        return np.stack(outs)[:, 0, :num]

    def write_all(self, k, v=None):
        """Writes any number of rows, a chunk at a time."""
        k = self._rows(k)
        v = k if v is None else self._rows(v)
        for start in range(0, k.shape[1], self.chunk):
            part = slice(start, start + self.chunk)
            self.write(k[:, part], v[:, part])

    def _rows(self, x):
        """Accepts [num_tokens, heads, dim] for a cache of one layer."""
        x = np.asarray(x, np.float32)
        return x if x.ndim == 4 else x[None]

    @property
    def differing_bytes(self):
        return self.oracle.differing_bytes(self.cache, self.state)

    def count(self, which, kind="saturated", phase="frozen"):
        """A counter of the state, [fp8_layers, groups]."""
        tally = getattr(self.state, f"{which}_tally")
        phase = {"frozen": FROZEN, "provisional": PROVISIONAL}[phase]
        return counters.total(getattr(tally, kind))[phase]
