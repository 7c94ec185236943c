"""What other formats of the cache would cost: quality on a sample, and exact bytes."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from fp8kv_jax.attention import attend
from fp8kv_jax.batch import Batch
from fp8kv_jax.decode import Forward
from fp8kv_jax.drift.attribution import fitted_scales
from fp8kv_jax.drift.formats import Format
from fp8kv_jax.drift.loss_sample import (
    LossSample,
    Scales,
    compare_tokens,
    relative_error,
    sum_squares,
)
from fp8kv_jax.drift.replay_step import Lane, begin_lane, end_lane
from fp8kv_jax.drift.result_loss import FormatReport, FormatTrial
from pallas_kernels.dispatch import Implementation

type BatchRows = Float[Array, "num_seqs num_queries num_kv_heads head_dim"]


class _Step(NamedTuple):
    logits: Array
    error: Float32[Array, "num_layers num_kv_heads"]
    norm: Float32[Array, "num_layers num_kv_heads"]


@functools.lru_cache(maxsize=8)  # several samples of one model compile once
def _make_step(
    forward: Forward,
    formats: tuple[Format, ...],
    layers: tuple[int, ...],
    implementation: Implementation | None,
) -> Callable:
    """Makes the jitted step of all formats; it donates both lanes.

    Returns:
      `(params, exact, seen, batch, real, index, scales, goes_on) -> (exact, seen,
      _Step)`, where `index` says which of the formats, `scales` are those of a static
      one and their reciprocals, and `goes_on` says whether layers hand on what the
      format made of the attention output, or the exact one.
    """

    def run(
        params: Any,
        exact: Lane,
        seen: Lane,
        batch: Batch,
        real: Float32[Array, "num_tokens"],
        index: Int32[Array, ""],
        scales: Float32[Array, "2 2 layers num_kv_heads"],
        goes_on: Bool[Array, ""],
    ) -> tuple[Lane, Lane, _Step]:
        def both(carry, layer, q, k, v, **options):
            exact_step, seen_step, errors = carry
            options["implementation"] = implementation
            want, exact_step = attend(exact_step, layer, q, k, v, **options)
            if layer in layers:
                # One step for all: each compilation takes as long as many passes.
                sees = [functools.partial(_see, form) for form in formats]
                row = scales[:, :, layers.index(layer)]
                k, v = lax.switch(index, sees, k, v, row)
            out, seen_step = attend(seen_step, layer, q, k, v, **options)
            error = sum_squares(out, want, real, num_kv_heads=k.shape[2])
            out = jnp.where(goes_on, out, want)
            return out, (exact_step, seen_step, (*errors, error))

        steps = (begin_lane(lane, batch, implementation) for lane in (exact, seen))
        logits, (*steps, errors) = forward(
            params, batch.token_ids, batch.positions, both, (*steps, ())
        )
        exact, seen = (end_lane(step, implementation) for step in steps)
        error, norm = jnp.moveaxis(jnp.stack(errors), 1, 0)
        return exact, seen, _Step(logits, error, norm)

    return jax.jit(run, donate_argnums=(1, 2))


def _see(
    form: Format, k: BatchRows, v: BatchRows, scales: Float32[Array, "2 2 h"]
) -> tuple[Array, Array]:
    """What a reader of the format sees of K and V, as rows of twice the heads."""
    rows = jnp.concatenate([k, v], axis=2)
    flat = rows.reshape(-1, *rows.shape[2:])
    if form.granularity is None:
        seen = form.fake_quantize(flat)
    else:
        scale, inv_scale = scales.reshape(2, -1)
        seen = form.fake_quantize(flat, scale=scale, inv_scale=inv_scale)
    k, v = jnp.split(seen.reshape(rows.shape), 2, axis=2)
    return k, v


class FormatTrials:
    """Runs a sample over formats of the cache, in the layers that the artifact covers.

    Caches hold float32, so that nothing rounds but the format. Static formats get
    scales made from the live maxima, without headroom: the best that they can do.

    Args:
      sample: what to run.
      formats: which ones.
      live_amax: of the whole workload, `[2, fp8_layers, num_kv_heads]`.

    Attributes:
      report: the findings, once `run` is exhausted.
    """

    def __init__(
        self, sample: LossSample, formats: Sequence[Format], *, live_amax: Scales
    ) -> None:
        self.report: FormatReport | None = None
        self._sample = sample
        self._formats = tuple(formats)
        # Reciprocals are made here: a GPU divides differently.
        by_head, by_tensor = (
            np.stack([scale, np.float32(1) / scale])
            for scale in fitted_scales(live_amax)
        )
        self._scales = {"head": by_head, "tensor": by_tensor}
        cache = replace(sample.cache, dtype="float32", high_precision_layers=())
        self._lanes = [sample.make_lane(cache) for _ in range(2)]

    @property
    def num_passes(self) -> int:
        """Forward passes that all of it takes."""
        return 2 * len(self._formats) * self._sample.num_batches

    def run(self) -> Iterator[int]:
        """Yields the number of forward passes so far, after each."""
        cache = self._sample.cache
        shape = cache.num_layers, cache.num_kv_heads
        trials, done = [], 0
        for index, form in enumerate(self._formats):
            kl, same_top = 0.0, 0
            error, norm = np.zeros((2, *shape))
            for batch, real in self._sample.batches():
                local = self._advance(index, batch, real, goes_on=False)
                error += np.asarray(local.error)
                norm += np.asarray(local.norm)
                yield (done := done + 1)
                whole = self._advance(index, batch, real, goes_on=True)
                sums = compare_tokens(local.logits, whole.logits, jnp.asarray(real))
                kl, same_top = kl + float(sums[0]), same_top + int(sums[1])
                yield (done := done + 1)
            num_tokens = self._sample.num_tokens
            trials.append(
                FormatTrial(
                    name=form.name,
                    kl_mean=kl / num_tokens,
                    top1_agreement=same_top / num_tokens,
                    local_attention_error=relative_error(error, norm),
                    **self._bytes_of(form),
                )
            )
        self.report = FormatReport(
            num_samples=self._sample.num_samples,
            num_tokens=self._sample.num_tokens,
            layers=self._sample.saved.layers,
            trials=tuple(trials),
        )

    def _advance(
        self, index: int, batch: Batch, real: np.ndarray, *, goes_on: bool
    ) -> _Step:
        sample = self._sample
        step = _make_step(
            sample.forward, self._formats, sample.saved.layers, sample.implementation
        )
        # A format without scales ignores them.
        granularity = self._formats[index].granularity or "head"
        *self._lanes, result = step(
            sample.params,
            *self._lanes,
            batch,
            jnp.asarray(real),
            jnp.asarray(index),
            self._scales[granularity],
            jnp.asarray(goes_on),
        )
        return result

    def _bytes_of(self, form: Format) -> dict[str, int]:
        cache = self._sample.cache
        sizes = {
            "num_layers": len(self._sample.saved.layers),
            "num_kv_heads": cache.num_kv_heads,
        }
        fixed, one = (form.metadata_bytes(num_tokens=n, **sizes) for n in (0, 1))
        codes = form.data_bytes(num_tokens=1, head_dim=cache.head_dim, **sizes)
        return {
            "code_bytes_per_token": codes,
            "metadata_bytes_per_token": one - fixed,
            "fixed_metadata_bytes": fixed,
        }
