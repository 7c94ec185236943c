"""Formats of a KV cache as exact fake-quantization, with the bytes that they take.

    form = FORMATS["int4_token_head"]
    seen = form.fake_quantize(rows)                   # what a reader would see, float32
    size = form.total_bytes(num_tokens=4096, num_layers=32, num_kv_heads=8, head_dim=128)

Results are equal bit for bit on every device, inside a `jit` or not. Two things would
break that. XLA on the GPU deletes a round trip through a narrow type, so codes pass a
barrier between the two conversions. And the GPU divides differently: scales that are
made from the rows are inverted by `reciprocal`, which is exact.
"""

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, UInt32

from fp8kv_jax.calibration import (
    SCALE_MAX,
    SCALE_MIN,
    Granularity,
    scale_of,
    scale_per_amax,
)
from pallas_kernels.fp8 import FP8_DTYPE, per_head

type Rows = Float[Array, "num_tokens num_kv_heads head_dim"]
type Seen = Float32[Array, "num_tokens num_kv_heads head_dim"]
type PerRow = Float32[Array, "num_tokens num_kv_heads 1"]

_KINDS = 2  # K and V
_SMALLEST_FLOAT16 = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Format(ABC):
    """A way of storing K and V rows.

    Args:
      name: short and unique; its key in `FORMATS`.
    """

    name: str

    @property
    @abstractmethod
    def bits_per_value(self) -> int:
        """Bits of one stored value, metadata apart."""

    @property
    def granularity(self) -> Granularity | None:
        """What one scale from outside serves; None if none is wanted."""
        return None

    @abstractmethod
    def metadata_bytes(
        self, *, num_tokens: int, num_layers: int, num_kv_heads: int
    ) -> int:
        """Bytes of scales and zero points of K and V together."""

    def data_bytes(
        self, *, num_tokens: int, num_layers: int, num_kv_heads: int, head_dim: int
    ) -> int:
        """Bytes of the codes of K and V together; a row of a head fills whole bytes."""
        bytes_per_row = -(-head_dim * self.bits_per_value // 8)
        return _KINDS * num_tokens * num_layers * num_kv_heads * bytes_per_row

    def total_bytes(
        self, *, num_tokens: int, num_layers: int, num_kv_heads: int, head_dim: int
    ) -> int:
        """Bytes of codes and metadata of K and V together."""
        sizes = {
            "num_tokens": num_tokens,
            "num_layers": num_layers,
            "num_kv_heads": num_kv_heads,
        }
        return self.data_bytes(**sizes, head_dim=head_dim) + self.metadata_bytes(
            **sizes
        )

    def fake_quantize(
        self, rows: Rows, *, scale: Any = None, inv_scale: Any = None
    ) -> Seen:
        """Computes what a reader of this format sees of some rows of K or of V.

        Args:
          rows: keys or values; rounded to BF16 first, as on entry to a cache.
          scale: of a static format: one, or one for each KV head; see
            `static_scales`.
          inv_scale: its reciprocal, carried beside it.

        Raises:
          ValueError: if a static format gets no scales, or another one gets some.
        """
        if (scale is None) != (inv_scale is None):
            raise ValueError(
                "Expected scale and inv_scale together: nobody recomputes the "
                "inverse. See static_scales."
            )
        if (scale is None) != (self.granularity is None):
            wanted = "no scale" if self.granularity is None else "a scale"
            got = "none" if scale is None else "one"
            raise ValueError(f"Expected {wanted} for {self.name}, got {got}.")
        if scale is None:
            return _round_trip(self, rows, None, None)
        num_kv_heads = rows.shape[1]
        scale = per_head(scale, num_kv_heads, name="scale")
        inv_scale = per_head(inv_scale, num_kv_heads, name="inv_scale")
        return _round_trip(self, rows, scale, inv_scale)

    @abstractmethod
    def _round_trip(
        self, rows: Seen, scale: PerRow | None, inv_scale: PerRow | None
    ) -> Seen:
        """Quantizes and dequantizes; rows and scales in float32, rows BF16 values."""


@functools.partial(jax.jit, static_argnums=0)
def _round_trip(
    form: Format, rows: Rows, scale: Array | None, inv_scale: Array | None
) -> Seen:
    rows = through(rows.astype(jnp.float32), jnp.bfloat16)
    per_row = [None if x is None else x[None, :, None] for x in (scale, inv_scale)]
    return form._round_trip(rows, *per_row)


def through(x: Float32[Array, "*shape"], dtype: Any) -> Float32[Array, "*shape"]:
    """Rounds float32 to a narrower type and back, also under a GPU's `jit`."""
    return lax.optimization_barrier(x.astype(dtype)).astype(jnp.float32)


def reciprocal(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Computes `1 / x`, correctly rounded on every device.

    With `x = m * 2^e` and integer m of 24 bits, the quotient's bits are those of
    `2^48 / m`, by long division: a bit at a time, from `2^25` down.

    Args:
      x: within [2^-100, 2^100].
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    exponent = bits >> 23
    divisor = (bits & 0x7FFFFF) | 0x800000

    def next_bit(_, state):
        rest, quotient = state
        fits = (rest >= divisor).astype(jnp.uint32)
        return (rest - fits * divisor) << 1, (quotient << 1) | fits

    # A loop: unrolled, and fused into two readers, it takes XLA half a minute a call.
    start = jnp.full_like(bits, 1 << 23), jnp.zeros_like(bits)
    _, quotient = lax.fori_loop(0, 26, next_bit, start)
    # One bit more than float32 holds. It can't be a tie: no m but 2^23 divides 2^48.
    significand: UInt32[Array, "*shape"] = (quotient + 1) >> 1
    # x = m * 2^(exponent - 150), so 1 / x = significand * 2^(103 - exponent).
    power = lax.bitcast_convert_type((230 - exponent) << 23, jnp.float32)
    return significand.astype(jnp.float32) * power


def static_scales(
    amax: Any, *, granularity: Granularity, headroom: float
) -> tuple[np.ndarray, np.ndarray]:
    """Makes the E4M3 scale of each KV head and its reciprocal, on the host.

    Args:
      amax: largest value of each KV head that the scales cover, > 0.
      granularity: "tensor" for one scale of all heads, "head" for one each.
      headroom: ratio between what a scale covers and the amax.
    """
    amax = np.asarray(amax, np.float32)
    if granularity == "tensor":
        amax = np.full_like(amax, amax.max())
    scale = scale_of(amax, scale_per_amax(headroom))
    return scale, 1 / scale


@dataclass(frozen=True, kw_only=True)
class Bf16(Format):
    """What a cache of full precision holds: rows are BF16 on entry, nothing is lost."""

    @property
    def bits_per_value(self) -> int:
        return 16

    def metadata_bytes(self, **sizes: int) -> int:
        return 0

    def _round_trip(self, rows, scale, inv_scale):
        return rows


@dataclass(frozen=True, kw_only=True)
class Fp8(Format):
    """FP8 codes `quantize(x * inv_scale)`, as the cache of this project writes them.

    The metadata are scale and reciprocal, float32 each, of each group and layer.

    Args:
      static: what a given scale serves; None for scale 1 and no metadata.
      dtype: E4M3 (largest value 448) or E5M2 (57,344); beyond it values clip.
    """

    static: Granularity | None
    dtype: Any = FP8_DTYPE

    @property
    def bits_per_value(self) -> int:
        return 8

    @property
    def granularity(self) -> Granularity | None:
        return self.static

    def metadata_bytes(
        self, *, num_tokens: int, num_layers: int, num_kv_heads: int
    ) -> int:
        if self.static is None:
            return 0
        groups = num_kv_heads if self.static == "head" else 1
        return _KINDS * num_layers * groups * 2 * 4

    def _round_trip(self, rows, scale, inv_scale):
        if scale is None:
            return _through_fp8(rows, self.dtype)
        return _through_fp8(rows * inv_scale, self.dtype) * scale


@dataclass(frozen=True, kw_only=True)
class DynamicFp8(Format):
    """E4M3 with a scale for each token and KV head: amax / 448 of that very row.

    Args:
      scale_dtype: how scales are stored: float32 or float16. Codes are made with the
        scale as stored.
    """

    scale_dtype: Any

    @property
    def bits_per_value(self) -> int:
        return 8

    def metadata_bytes(
        self, *, num_tokens: int, num_layers: int, num_kv_heads: int
    ) -> int:
        scales = _KINDS * num_tokens * num_layers * num_kv_heads
        return scales * np.dtype(self.scale_dtype).itemsize

    def _round_trip(self, rows, scale, inv_scale):
        magnitude = jnp.where(jnp.isfinite(rows), jnp.abs(rows), 0.0)
        amax = jnp.max(magnitude, axis=-1, keepdims=True)
        scale = _stored(amax * scale_per_amax(1.0), self.scale_dtype)
        return _through_fp8(rows * reciprocal(scale), FP8_DTYPE) * scale


@dataclass(frozen=True, kw_only=True)
class AsymmetricInt(Format):
    """Unsigned integers between the smallest and the largest value of each row.

    For each token and KV head: `x ~ code * scale + zero`, where `zero` is the row's
    smallest value and `scale` the span over the codes, both stored as float16. Made
    online from the row itself, without data. Integers can't hold NaN or Inf: those
    take no part in the span, Inf clips to its end, NaN is stored as code 0.

    Args:
      bits: of a code.

    References:
      The scheme of LMDeploy's online INT4/INT8 cache (asymmetric, by head and token),
      https://lmdeploy.readthedocs.io/en/v0.13.0/quantization/kv_quant.html
    """

    bits: Literal[4, 8]

    @property
    def bits_per_value(self) -> int:
        return self.bits

    def metadata_bytes(
        self, *, num_tokens: int, num_layers: int, num_kv_heads: int
    ) -> int:
        return _KINDS * num_tokens * num_layers * num_kv_heads * (2 + 2)

    def _round_trip(self, rows, scale, inv_scale):
        largest_code = 2**self.bits - 1
        finite = jnp.isfinite(rows)

        def over_row(reduce, otherwise: float) -> PerRow:
            end = reduce(jnp.where(finite, rows, otherwise), axis=-1, keepdims=True)
            return jnp.where(jnp.isfinite(end), end, 0.0)

        zero = _stored_float16(over_row(jnp.min, jnp.inf))
        span = over_row(jnp.max, -jnp.inf) - zero
        scale = _stored(span * np.float32(1 / largest_code), jnp.float16)
        codes = jnp.round((rows - zero) * reciprocal(scale))
        codes = jnp.where(jnp.isnan(codes), 0.0, jnp.clip(codes, 0, largest_code))
        # The product has at most 8 + 11 bits and is exact, so that it does not matter
        # whether a device fuses it with the sum.
        return through(codes, jnp.uint8) * scale + zero


def _through_fp8(y: Seen, dtype: Any) -> Seen:
    """Rounds to FP8, ties to even: NaN stays NaN, the rest clips."""
    largest = float(jnp.finfo(dtype).max)
    clipped = jnp.where(jnp.isnan(y), y, jnp.clip(y, -largest, largest))
    return through(clipped, dtype)


def _stored(scale: PerRow, dtype: Any) -> PerRow:
    """A scale as it is stored: positive, finite, in the given type."""
    smallest = _SMALLEST_FLOAT16 if dtype == jnp.float16 else SCALE_MIN
    largest = min(float(jnp.finfo(dtype).max), SCALE_MAX)
    return through(jnp.clip(scale, smallest, largest), dtype)


def _stored_float16(x: PerRow) -> PerRow:
    largest = float(jnp.finfo(jnp.float16).max)
    return through(jnp.clip(x, -largest, largest), jnp.float16)


_ALL = (
    Bf16(name="bf16"),
    Fp8(name="fp8_tensor", static="tensor"),
    Fp8(name="fp8_head", static="head"),
    Fp8(name="fp8_unscaled", static=None),
    DynamicFp8(name="fp8_token_head", scale_dtype=jnp.float32),
    DynamicFp8(name="fp8_token_head_f16", scale_dtype=jnp.float16),
    Fp8(name="e5m2", static=None, dtype=jnp.float8_e5m2),
    AsymmetricInt(name="int8_token_head", bits=8),
    AsymmetricInt(name="int4_token_head", bits=4),
)
FORMATS: dict[str, Format] = {form.name: form for form in _ALL}
