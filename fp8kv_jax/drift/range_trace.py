"""The range tables of a recorded trace of keys and values: no model runs."""

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fp8kv_jax.drift.range import RangeSums, SavedRange, read_range
from fp8kv_jax.drift.trace import Trace
from fp8kv_jax.drift.workload import UNKNOWN_LANGUAGE, Sample, Tally
from fp8kv_jax.drift.workload_slices import NUM_DIMENSIONS, SliceTable, make_slices
from fp8kv_jax.scales.scale_set import ScaleError, ScaleSet

# Tokens read from the file at once.
_BLOCK = 256


def scan_trace(trace: Trace) -> Tally:
    """What a trace holds, as a workload: each text is a sample of its class."""
    longest = max(text.num_tokens for text in trace.texts)
    tally = Tally(lengths=np.zeros(longest + 1, np.int64), classes={}, languages={})
    for line, text in enumerate(trace.texts, 1):
        sample = Sample(
            line=line,
            name=text.name,
            content="",
            data_class=text.data_class,
            language=UNKNOWN_LANGUAGE,
            expected=(),
        )
        tally.add(sample, text.num_tokens, cut=False)
    tally.sha256 = _digest(trace.path)
    return tally


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class TraceReplay:
    """Reads a trace against saved scales, a block of tokens at a time.

    Raises:
      ScaleError: if the scales are for other layers or heads than the trace has.
    """

    def __init__(self, trace: Trace, scales: ScaleSet, tally: Tally) -> None:
        shape = trace.shape
        scales.check(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads)
        if not scales.layers:
            raise ScaleError("Expected scales of a layer.")
        self.slices: SliceTable = make_slices(tally, max_new_tokens=0)
        saved = SavedRange.of(scales, shape.num_kv_heads, scales.layers)
        self.ranges = RangeSums(saved, self.slices, head_dim=shape.head_dim)
        self._trace = trace
        self._inverse = jnp.asarray(saved.inv_scale)
        read = functools.partial(read_range, num_slices=len(self.slices))
        # Over layers, then over keys and values.
        over_layers = jax.vmap(read, in_axes=(0, 0, None))
        self._read = jax.jit(jax.vmap(over_layers, in_axes=(0, 0, None)))

    def run(self) -> Iterator[int]:
        """Yields the number of tokens read so far, after each block."""
        done, layers = 0, list(self.ranges.saved.layers)
        for text in self._trace.texts:
            for start, k, v in self._trace.blocks(text.name, _BLOCK):
                num_tokens = k.shape[1]
                rows = np.stack([k[layers], v[layers]])
                # Padded, so that one shape is compiled.
                padding = ((0, 0), (0, 0), (0, _BLOCK - num_tokens), (0, 0), (0, 0))
                rows = np.pad(rows, padding)
                slices = np.full((_BLOCK, NUM_DIMENSIONS), len(self.slices), np.int32)
                slices[:num_tokens] = self.slices.of_tokens(
                    data_class=text.data_class,
                    language=UNKNOWN_LANGUAGE,
                    prompt_length=text.num_tokens,
                    positions=np.arange(start, start + num_tokens, dtype=np.int32),
                )
                reading = self._read(jnp.asarray(rows), self._inverse, slices)
                counts = np.zeros(len(self.slices), np.int64)
                np.add.at(counts, slices[:num_tokens], 1)
                self.ranges.add(jax.device_get(reading), counts)
                done += num_tokens
                yield done
