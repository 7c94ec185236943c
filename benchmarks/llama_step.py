"""A decode step of a Llama shape with random weights and full pools, ready to time."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fp8kv_jax as fp8kv
from benchmarks import turn
from models.config import ModelConfig
from models.rope import Llama3Scaling, Rope
from models.transformer import Forward, abstract_model, bind_forward
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp8 import is_fp8
from pallas_kernels.pages.layout import from_bits

PAGE_SIZE = 128
WINDOW_TOKENS = 4096
_SCALING = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=8192
)


def llama_config(
    *,
    num_layers: int = 32,
    hidden_size: int = 4096,
    num_q_heads: int = 32,
    num_kv_heads: int = 8,
    intermediate_size: int = 14336,
    vocab_size: int = 128256,
) -> ModelConfig:
    """Describes Llama-3.1-8B, or a smaller one of its kind."""
    return ModelConfig(
        architecture="llama",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        max_context=131072,
        ropes=(Rope(base=5e5, scaling=_SCALING),) * num_layers,
        sliding_windows=(None,) * num_layers,
        softmax_scale=128**-0.5,
        rms_norm_eps=1e-5,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """How many sequences of how many tokens decode, over pools of which dtype."""

    model: ModelConfig
    num_seqs: int
    seq_len: int
    dtype: str = "fp8"

    @property
    def name(self) -> str:
        return f"{self.num_seqs}x{self.seq_len}"

    @property
    def cache(self) -> fp8kv.CacheConfig:
        return fp8kv.CacheConfig(
            num_layers=self.model.num_layers,
            num_kv_heads=self.model.num_kv_heads,
            head_dim=self.model.head_dim,
            num_pages=self.num_seqs * -(-self.seq_len // PAGE_SIZE),
            page_size=PAGE_SIZE,
            dtype=self.dtype,
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a step reads."""
        return self.num_seqs * self.seq_len * self.cache.bytes_per_token


def abstract_params(model: ModelConfig, *, fused: bool = True) -> tuple[Forward, Any]:
    """Makes a model's forward function, and describes its BF16 weights."""
    graphdef, shapes = abstract_model(model, jnp.bfloat16, fused=fused)
    return bind_forward(graphdef), shapes


def random_params(
    model: ModelConfig, *, seed: int = 0, fused: bool = True
) -> tuple[Forward, Any]:
    """Makes a model's forward function and random BF16 weights on the device."""
    forward, shapes = abstract_params(model, fused=fused)
    leaves, treedef = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(leaves))
    made = [_random(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)]
    return forward, jax.tree.unflatten(treedef, made)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if len(shape) == 1:  # scales of norms
        return jnp.ones(shape, dtype)
    return jax.random.normal(key, shape, dtype) * jnp.asarray(min(shape) ** -0.5, dtype)


def weight_bytes(params: Any) -> int:
    """Bytes of weights that a step reads: all but the embedding's other rows."""
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    return total - params["embedding"].nbytes


def full_cache(shape: StepShape, seed: int = 0) -> fp8kv.PagedKVCache:
    """Makes pools of random values of about order 1: zeros would run cooler."""
    empty = jax.eval_shape(lambda: fp8kv.init_cache(shape.cache))
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 2 * empty.num_layers)
    leaves, treedef = jax.tree.flatten(empty)
    made = [_pool(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(treedef, made)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _pool(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    pool = jax.ShapeDtypeStruct(shape, dtype)
    if not is_fp8(pool):
        return jax.random.normal(key, shape, dtype)
    # Without the exponent's highest bit: codes from -1.875 to 1.875, none a NaN.
    codes = jax.random.bits(key, shape, jnp.uint8) & jnp.uint8(0xBF)
    return codes if dtype == jnp.uint8 else from_bits(codes, dtype)


def calibrating_state(
    shape: StepShape,
    *,
    window_tokens: int = WINDOW_TOKENS,
    max_tokens_per_step: int | None = None,
) -> fp8kv.CalibrationState:
    """Makes a state that has seen nothing yet, for decode steps if not told else."""
    config = fp8kv.CalibrationConfig(window_tokens=window_tokens)
    max_tokens = max_tokens_per_step or shape.num_seqs
    return fp8kv.init_calibration(config, shape.cache, max_tokens_per_step=max_tokens)


def begin_window(state: fp8kv.CalibrationState) -> fp8kv.CalibrationState:
    """Puts a state back to where nothing was seen; its amax stay."""
    return replace(
        state,
        frozen=jnp.zeros_like(state.frozen),
        tokens_seen=jnp.zeros_like(state.tokens_seen),
    )


def freeze(state: fp8kv.CalibrationState) -> fp8kv.CalibrationState:
    """Declares a state's scales final, whatever was seen."""
    return replace(state, frozen=jnp.array(True))


@jax.jit
def almost_complete_window(state: fp8kv.CalibrationState) -> fp8kv.CalibrationState:
    """Puts a state to where one token is missing, each row of the window in a slot."""
    staged = state.staged
    assert staged is not None
    row = jnp.arange(staged.slot_owner.size, dtype=jnp.int32)
    owner = jnp.where(row < state.window - 1, row, -1)
    return replace(
        state,
        frozen=jnp.zeros_like(state.frozen),
        tokens_seen=state.window - 1,
        staged=replace(staged, slot_owner=owner),
    )


def frozen_state(shape: StepShape) -> fp8kv.CalibrationState:
    """Makes a state whose scales are final, with its window not yet released."""
    return freeze(calibrating_state(shape))


def decode_batch(shape: StepShape, seed: int = 0) -> fp8kv.Batch:
    """Makes the newest token of each sequence, pages in random order."""
    rng = np.random.default_rng(seed)
    pages = rng.permutation(shape.cache.num_pages).reshape(shape.num_seqs, -1)
    page, offset = divmod(shape.seq_len - 1, PAGE_SIZE)
    ids = rng.integers(0, shape.model.vocab_size, (shape.num_seqs, 1))
    lens = np.full(shape.num_seqs, shape.seq_len)
    arrays = {
        "token_ids": ids,
        "slot_mapping": pages[:, page, None] * PAGE_SIZE + offset,
        "query_starts": lens - 1,
        "seq_lens": lens,
        "block_table": pages,
    }
    return fp8kv.Batch(**{k: jnp.asarray(x, jnp.int32) for k, x in arrays.items()})


def lower_step(
    forward: Forward,
    params: Any,
    shape: StepShape,
    *,
    released: bool = False,
    implementation: Implementation | None = None,
) -> jax.stages.Lowered:
    """Lowers the decode step, which is given its cache and its state for good."""

    def arguments() -> tuple[Any, ...]:
        state = calibrating_state(shape)
        state = replace(state, staged=None) if released else state
        return fp8kv.init_cache(shape.cache), state, decode_batch(shape)

    step = fp8kv.make_steps(forward, implementation=implementation).decode_step
    return turn.lower(step, params, *jax.eval_shape(arguments), donate=(1, 2))
