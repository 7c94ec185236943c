"""The pieces of a decoder layer: norm, projections, attention block, gated MLP."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from models.config import Activation, ModelConfig
from models.rope import rotate


class Attend(Protocol):
    """Attention over whatever the carry remembers, and over this call's own k and v.

    A step function implements it with a cache in `carry`; `full_attention` without
    one. The three options are Python values, so an implementation may branch on them.
    """

    def __call__(
        self,
        carry: Any,
        layer_index: int,
        q: Float[Array, "num_seqs num_queries num_q_heads head_dim"],
        k: Float[Array, "num_seqs num_queries num_kv_heads head_dim"],
        v: Float[Array, "num_seqs num_queries num_kv_heads head_dim"],
        *,
        softmax_scale: float,
        sliding_window: int | None,
        logit_soft_cap: float | None,
    ) -> tuple[Float[Array, "num_seqs num_queries num_q_heads head_dim"], Any]: ...


def matmul_precision(dtype: DTypeLike) -> jax.lax.Precision | None:
    """Chooses true float32 products for float32, where a GPU would default to TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def soft_cap(x: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """Squashes x into (-cap, cap) with a tanh; the identity for None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class RmsNorm(nnx.Module):
    """Divides by the root mean square over the last axis; float32 inside.

    The scale stays float32 whatever the compute type: it is small, and Gemma's
    `1 + weight` would lose bits in BF16.
    """

    def __init__(self, size: int, eps: float) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))

    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * jax.lax.rsqrt(mean_square + self.eps) * scale).astype(x.dtype)


class Projection(nnx.Module):
    """A matrix product with a row-major `[in, out]` kernel, and a bias if asked for."""

    def __init__(
        self,
        size_in: int,
        size_out: int,
        *,
        bias: bool = False,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        normal = jax.random.normal(rngs.params(), (size_in, size_out), dtype)
        self.kernel = nnx.Param(normal * jnp.asarray(size_in**-0.5, dtype))
        self.bias = nnx.Param(jnp.zeros((size_out,), dtype)) if bias else None

    def __call__(
        self, x: Float[Array, "num_seqs num_queries in"]
    ) -> Float[Array, "num_seqs num_queries out"]:
        y = jnp.dot(x, self.kernel[...], precision=matmul_precision(x.dtype))
        return y if self.bias is None else y + self.bias[...][None, None, :]


class AttentionBlock(nnx.Module):
    """Projects to q, k, v, norms and rotates them, attends, and projects back.

    Fused, the three projections are one matrix, its columns in this order.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        fused: bool = False,
    ) -> None:
        self.config = config
        self.layer_index = layer_index
        q_size = config.num_q_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        hidden, bias = config.hidden_size, config.qkv_bias

        def projection(size: int) -> Projection:
            return Projection(hidden, size, bias=bias, dtype=dtype, rngs=rngs)

        self.fused = fused
        if fused:
            self.qkv = projection(q_size + 2 * kv_size)
        else:
            self.q = projection(q_size)
            self.k, self.v = projection(kv_size), projection(kv_size)
        self.out = Projection(q_size, hidden, dtype=dtype, rngs=rngs)
        norm = config.qk_norm
        self.q_norm = RmsNorm(config.head_dim, config.rms_norm_eps) if norm else None
        self.k_norm = RmsNorm(config.head_dim, config.rms_norm_eps) if norm else None

    def __call__(
        self,
        x: Float[Array, "num_seqs num_queries hidden"],
        rotation: tuple[jax.Array, jax.Array],
        attend: Attend,
        carry: Any,
    ) -> tuple[Float[Array, "num_seqs num_queries hidden"], Any]:
        config = self.config
        q, k, v = (
            y.reshape(*y.shape[:2], -1, config.head_dim) for y in self._project(x)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out, carry = attend(
            carry,
            self.layer_index,
            rotate(q, *rotation),
            rotate(k, *rotation),
            v,
            softmax_scale=config.softmax_scale,
            sliding_window=config.sliding_windows[self.layer_index],
            logit_soft_cap=config.attention_soft_cap,
        )
        return self.out(out.reshape(*out.shape[:2], -1)), carry

    def _project(self, x: Float[Array, "num_seqs num_queries hidden"]) -> list[Array]:
        if not self.fused:
            return [self.q(x), self.k(x), self.v(x)]
        q_size = self.config.num_q_heads * self.config.head_dim
        kv_size = self.config.num_kv_heads * self.config.head_dim
        return jnp.split(self.qkv(x), [q_size, q_size + kv_size], axis=-1)


class GatedMlp(nnx.Module):
    """`down(activation(gate(x)) * up(x))`; fused, gate and up are one matrix."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        fused: bool = False,
    ) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.activation: Activation = config.activation
        self.fused = fused
        if fused:
            self.gate_up = Projection(hidden, 2 * inner, dtype=dtype, rngs=rngs)
        else:
            self.gate = Projection(hidden, inner, dtype=dtype, rngs=rngs)
            self.up = Projection(hidden, inner, dtype=dtype, rngs=rngs)
        self.down = Projection(inner, hidden, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "num_seqs num_queries hidden"]
    ) -> Float[Array, "num_seqs num_queries hidden"]:
        if self.fused:
            gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        else:
            gate, up = self.gate(x), self.up(x)
        if self.activation == "silu":
            gate = jax.nn.silu(gate)
        else:
            gate = jax.nn.gelu(gate, approximate=True)
        return self.down(gate * up)
