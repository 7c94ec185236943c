"""The public op: checks a call, brings it into one form, and picks who serves it."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, dispatch, lazily
from pallas_kernels.fp8 import is_fp8
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.pages.layout import KPages, PageGeometry, VPages, page_geometry

IMPLEMENTATIONS: Mapping[Implementation, Callable[..., Any]] = {
    "mosaic_gpu": lazily(
        "pallas_kernels.paged_attention.mosaic_gpu", "paged_attention_mosaic_gpu"
    ),
    "xla": paged_attention_reference,
}


@functools.partial(
    jax.jit,
    static_argnames=(
        "softmax_scale",
        "sliding_window",
        "logit_soft_cap",
        "implementation",
    ),
)
def paged_attention(
    q: Float[Array, "num_seqs num_queries num_q_heads head_dim"],
    k_pages: KPages,
    v_pages: VPages,
    block_table: Int[Array, "num_seqs pages_per_seq"],
    seq_lens: Int[Array, "num_seqs"],
    *,
    query_starts: Int[Array, "num_seqs"] | None = None,
    k_scale: float | Float[Array, "..."] | None = None,
    v_scale: float | Float[Array, "..."] | None = None,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "num_seqs num_queries num_q_heads head_dim"]:
    """Attends new queries to the tokens their sequences hold in a paged KV cache.

    Equivalent, for each query at `position = query_starts + i`, to softmax attention
    in float32 over the tokens `t <= position`, `t < seq_len` and, with a sliding
    window, `t > position - sliding_window`. The keys and values of the queries
    themselves are read from the pool: append them first.

    Slots that no query of a sequence sees are never read into its output, whatever
    bytes they hold. A NaN in a slot that one sees makes outputs of that sequence NaN
    and leaves all others alone.

    >>> import jax.numpy as jnp
    >>> from pallas_kernels.paged_attention import paged_attention
    >>> from pallas_kernels.pages.layout import make_pages
    >>> k_pages, v_pages = make_pages(4, 2, 16, 64, jnp.float8_e4m3fn)
    >>> q = jnp.ones((1, 1, 8, 64), jnp.bfloat16)
    >>> block_table, seq_lens = jnp.array([[2, 0]]), jnp.array([20])
    >>> scales = {"k_scale": 0.5, "v_scale": 0.5}
    >>> paged_attention(q, k_pages, v_pages, block_table, seq_lens, **scales).shape
    (1, 1, 8, 64)

    Args:
      q: queries, bfloat16 or float32. Query heads `h * group_size` and following share
        KV head h.
      k_pages: pool of keys.
      v_pages: pool of values.
      block_table: pages of each sequence, in order. Entries past its last token are
        ignored, out of range or not.
      seq_lens: tokens of each sequence in the pool, the newest included. A sequence
        of length 0 gives zeros.
      query_starts: position of the first query of each sequence. By default the
        queries are the last tokens: `seq_lens - num_queries`. Queries at a position
        outside `0 <= position < seq_len` are padding and give zeros.
      k_scale: what a key's code is multiplied by, one or one per KV head. Required
        for FP8 pools, and only for them.
      v_scale: the same for values.
      softmax_scale: factor on the logits; `head_dim**-0.5` by default.
      sliding_window: how many tokens a query sees, itself included; all by default.
      logit_soft_cap: bound on the logits, `cap * tanh(logits / cap)`.
      implementation: a name, or None for the best one that works.

    Returns:
      The attention output, in q's shape and dtype.

    Raises:
      ValueError: if shapes, dtypes or options disagree, on any implementation.
      NotImplementedError: if the one implementation asked for can't serve this call.
    """
    geometry = page_geometry(k_pages, v_pages)
    _check_queries(q, geometry)
    _check_sequences(q.shape[0], block_table, seq_lens, query_starts)
    _check_options(softmax_scale, sliding_window, logit_soft_cap)
    fp8 = is_fp8(k_pages)
    return dispatch(
        IMPLEMENTATIONS,
        implementation,
        q,
        k_pages,
        v_pages,
        block_table,
        seq_lens,
        query_starts=query_starts,
        k_scale=_canonical_scale(k_scale, geometry, fp8, name="k_scale"),
        v_scale=_canonical_scale(v_scale, geometry, fp8, name="v_scale"),
        softmax_scale=(
            geometry.head_dim**-0.5 if softmax_scale is None else softmax_scale
        ),
        sliding_window=sliding_window,
        logit_soft_cap=logit_soft_cap,
    )


def _check_queries(q: jax.Array, geometry: PageGeometry) -> None:
    if q.ndim != 4 or q.shape[3] != geometry.head_dim:
        raise ValueError(
            "Expected q to be [num_seqs, num_queries, num_q_heads, head_dim] with the "
            f"head_dim {geometry.head_dim} of k_pages, got shape {q.shape}."
        )
    if q.shape[2] % geometry.num_kv_heads:
        raise ValueError(
            f"Expected num_q_heads={q.shape[2]} to be a multiple of "
            f"num_kv_heads={geometry.num_kv_heads}, the KV heads of k_pages."
        )
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"Expected q to be bfloat16 or float32, got {q.dtype}.")


def _check_sequences(
    num_seqs: int,
    block_table: jax.Array,
    seq_lens: jax.Array,
    query_starts: jax.Array | None,
) -> None:
    if block_table.ndim != 2 or block_table.shape[0] != num_seqs:
        raise ValueError(
            f"Expected block_table to be [{num_seqs}, pages_per_seq], one row per "
            f"sequence of q, got shape {block_table.shape}."
        )
    per_seq = {"seq_lens": seq_lens, "query_starts": query_starts}
    for name, x in per_seq.items():
        if x is not None and x.shape != (num_seqs,):
            raise ValueError(
                f"Expected {name} to be [{num_seqs}], one per sequence of q, "
                f"got shape {x.shape}."
            )
    for name, x in {"block_table": block_table, **per_seq}.items():
        if x is not None and x.dtype != jnp.int32:
            raise ValueError(f"Expected {name} to be int32, got {x.dtype}.")


def _check_options(
    softmax_scale: float | None,
    sliding_window: int | None,
    logit_soft_cap: float | None,
) -> None:
    options = {
        "softmax_scale": softmax_scale,
        "sliding_window": sliding_window,
        "logit_soft_cap": logit_soft_cap,
    }
    for name, value in options.items():
        if value is not None and not value > 0:
            raise ValueError(f"Expected {name} to be positive or None, got {value}.")


def _canonical_scale(
    scale: float | Float[Array, "..."] | None,
    geometry: PageGeometry,
    fp8: bool,
    *,
    name: str,
) -> Float[Array, "num_scales"] | None:
    """Brings a scale to float32 `[1]` or `[num_kv_heads]`; None for other pools."""
    if not fp8:
        if scale is not None:
            raise ValueError(
                f"Expected {name} to be None: only FP8 pools hold scaled codes."
            )
        return None
    if scale is None:
        raise ValueError(f"Expected {name} for FP8 pools, got None.")
    scale = jnp.asarray(scale, jnp.float32)
    if scale.ndim > 1 or scale.size not in (1, geometry.num_kv_heads):
        raise ValueError(
            f"Expected {name} to be one value or one per KV head "
            f"({geometry.num_kv_heads}), got shape {scale.shape}."
        )
    return scale.reshape(-1)
