"""One decoder for all families: embedding, layers, final norm, head."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Float32, Int32

from models.config import ModelConfig
from models.layers import (
    Attend,
    AttentionBlock,
    GatedMlp,
    RmsNorm,
    matmul_precision,
    soft_cap,
)
from models.rope import rotations


class Forward(Protocol):
    """A model as a pure function of its parameters; what step functions are handed."""

    def __call__(
        self,
        params: Any,
        token_ids: Int32[Array, "num_seqs num_queries"],
        positions: Int32[Array, "num_seqs num_queries"],
        attend: Attend,
        carry: Any,
        *,
        logits_at: Int32[Array, "num_seqs"] | None = None,
    ) -> tuple[Float32[Array, "..."], Any]: ...


class DecoderLayer(nnx.Module):
    """Attention, then the MLP, each on a normed input and added to the residual."""

    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        fused: bool = False,
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        sandwich = config.sandwich_norms
        self.attention_norm = RmsNorm(size, eps)
        self.attention = AttentionBlock(
            config, layer_index, dtype=dtype, rngs=rngs, fused=fused
        )
        self.attention_out_norm = RmsNorm(size, eps) if sandwich else None
        self.mlp_norm = RmsNorm(size, eps)
        self.mlp = GatedMlp(config, dtype=dtype, rngs=rngs, fused=fused)
        self.mlp_out_norm = RmsNorm(size, eps) if sandwich else None

    def __call__(
        self,
        x: Float[Array, "num_seqs num_queries hidden"],
        rotation: tuple[jax.Array, jax.Array],
        attend: Attend,
        carry: Any,
    ) -> tuple[Float[Array, "num_seqs num_queries hidden"], Any]:
        y, carry = self.attention(self.attention_norm(x), rotation, attend, carry)
        x = x + (y if self.attention_out_norm is None else self.attention_out_norm(y))
        y = self.mlp(self.mlp_norm(x))
        return x + (y if self.mlp_out_norm is None else self.mlp_out_norm(y)), carry


class Transformer(nnx.Module):
    """A decoder. The compute type is the type of its matrices; logits are float32."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        fused: bool = False,
    ) -> None:
        self.config = config
        table = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(_random_table(rngs, table, dtype))
        self.layers = nnx.List(
            [
                DecoderLayer(config, index, dtype=dtype, rngs=rngs, fused=fused)
                for index in range(config.num_layers)
            ]
        )
        self.final_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        # Row-major [vocab, hidden] like the embedding, so that both heads multiply
        # alike; on a CPU this order is also the faster one for several rows.
        self.head = (
            None if config.tied_head else nnx.Param(_random_table(rngs, table, dtype))
        )

    def __call__(
        self,
        token_ids: Int32[Array, "num_seqs num_queries"],
        positions: Int32[Array, "num_seqs num_queries"],
        attend: Attend,
        carry: Any,
        *,
        logits_at: Int32[Array, "num_seqs"] | None = None,
    ) -> tuple[Float32[Array, "..."], Any]:
        config = self.config
        x = self.embedding[...][token_ids]
        if config.embedding_scale != 1.0:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        turns = rotations(config.ropes, config.head_dim, positions)
        for rope, layer in zip(config.ropes, self.layers, strict=True):
            x, carry = layer(x, turns[rope], attend, carry)
        if logits_at is not None:
            # Before the head: the head is the largest product of a small model.
            x = x[jnp.arange(x.shape[0]), logits_at]
        return self._logits(self.final_norm(x)), carry

    def _logits(self, x: Float[Array, "... hidden"]) -> Float32[Array, "... vocab"]:
        head = self.embedding if self.head is None else self.head
        logits = jax.lax.dot_general(
            x,
            head[...],
            (((x.ndim - 1,), (1,)), ((), ())),
            precision=matmul_precision(x.dtype),
            preferred_element_type=jnp.float32,
        )
        return soft_cap(logits, self.config.logit_soft_cap)


def _random_table(rngs: nnx.Rngs, shape: tuple[int, int], dtype: DTypeLike) -> Array:
    normal = jax.random.normal(rngs.params(), shape, dtype)
    return normal * jnp.asarray(shape[1] ** -0.5, dtype)


def bind_forward(graphdef: nnx.GraphDef) -> Forward:
    """Makes the pure forward function of a model from its graph definition.

    Example:
      >>> graphdef, params = random_model(config, seed=0, dtype=jnp.float32)
      >>> forward = bind_forward(graphdef)
      >>> logits, carry = forward(params, token_ids, positions, full_attention, None)
    """

    def forward(
        params: Any,
        token_ids: Int32[Array, "num_seqs num_queries"],
        positions: Int32[Array, "num_seqs num_queries"],
        attend: Attend,
        carry: Any,
        *,
        logits_at: Int32[Array, "num_seqs"] | None = None,
    ) -> tuple[Float32[Array, "..."], Any]:
        model = nnx.merge(graphdef, params)
        return model(token_ids, positions, attend, carry, logits_at=logits_at)

    return forward


def abstract_model(
    config: ModelConfig, dtype: DTypeLike, *, fused: bool = False
) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """Describes a model without making it: its parameters as shapes and dtypes."""

    def build() -> Transformer:
        return Transformer(config, dtype=dtype, rngs=nnx.Rngs(0), fused=fused)

    graphdef, state = nnx.split(nnx.eval_shape(build))
    return graphdef, nnx.to_pure_dict(state)


def random_model(
    config: ModelConfig, *, seed: int, dtype: DTypeLike
) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """Makes a model with random weights, for tests and benchmarks.

    Returns:
      The graph definition, and the parameters as nested plain dicts: `jit` flattens
      those four times as fast as an `nnx.State`, in every step.
    """
    model = Transformer(config, dtype=dtype, rngs=nnx.Rngs(seed))
    graphdef, state = nnx.split(model)
    return graphdef, nnx.to_pure_dict(state)
