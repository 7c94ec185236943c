"""Greedy sampling from a small Gemma-style decoder: plain flax.nnx, an FP8 cache."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

import fp8kv_jax as fp8kv

PAGE_SIZE = 16


@dataclass(frozen=True)
class GemmaConfig:
    num_layers: int = 3
    embed_dim: int = 64
    hidden_dim: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    num_embed: int = 256
    cache_len: int = 64
    final_logit_softcap: float = 30.0


class RMSNorm(nnx.Module):
    def __init__(self, dim):
        self.scale = nnx.Param(jnp.zeros((dim,)))

    def __call__(self, x):
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        weight = (1 + self.scale[...]).reshape((1,) * (x.ndim - 1) + (-1,))
        return x * jax.lax.rsqrt(variance + 1e-6) * weight


def apply_rope(x, positions):
    fraction = jnp.arange(0, x.shape[-1], 2, dtype=jnp.float32) / x.shape[-1]
    angle = positions.astype(jnp.float32)[:, None] / (1e4**fraction)[None, :]
    first, second = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angle)[None, :, None], jnp.cos(angle)[None, :, None]
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


class Attention(nnx.Module):
    def __init__(self, cfg, rngs):
        self.query_norm, self.key_norm = RMSNorm(cfg.head_dim), RMSNorm(cfg.head_dim)

        def einsum(heads):
            shape = (cfg.embed_dim, heads, cfg.head_dim)
            return nnx.Param(cfg.embed_dim**-0.5 * jax.random.normal(rngs(), shape))

        self.q_w, self.o_w = einsum(cfg.num_heads), einsum(cfg.num_heads)
        self.k_w, self.v_w = einsum(cfg.num_kv_heads), einsum(cfg.num_kv_heads)

    def __call__(self, x, positions, layer, step):
        q = jnp.einsum("btd,dnh->btnh", x, self.q_w[...])
        k = jnp.einsum("btd,dnh->btnh", x, self.k_w[...])
        v = jnp.einsum("btd,dnh->btnh", x, self.v_w[...])
        q = apply_rope(self.query_norm(q), positions)
        k = apply_rope(self.key_norm(k), positions)
        encoded, step = fp8kv.attend(step, layer, q, k, v)
        return jnp.einsum("btnh,dnh->btd", encoded, self.o_w[...]), step


class FeedForward(nnx.Module):
    def __init__(self, cfg, rngs):
        def linear(rows, columns):
            return nnx.Param(rows**-0.5 * jax.random.normal(rngs(), (rows, columns)))

        self.gating, self.up = (linear(cfg.embed_dim, cfg.hidden_dim) for _ in "gu")
        self.down = linear(cfg.hidden_dim, cfg.embed_dim)

    def __call__(self, x):
        return (nnx.gelu(x @ self.gating[...]) * (x @ self.up[...])) @ self.down[...]


class Block(nnx.Module):
    def __init__(self, cfg, rngs):
        self.pre_attn, self.pre_ffw = RMSNorm(cfg.embed_dim), RMSNorm(cfg.embed_dim)
        self.post_attn, self.post_ffw = RMSNorm(cfg.embed_dim), RMSNorm(cfg.embed_dim)
        self.attn, self.mlp = Attention(cfg, rngs), FeedForward(cfg, rngs)

    def __call__(self, x, positions, layer, step):
        attn, step = self.attn(self.pre_attn(x), positions, layer, step)
        x = x + self.post_attn(attn)
        return x + self.post_ffw(self.mlp(self.pre_ffw(x))), step


class Gemma(nnx.Module):
    def __init__(self, cfg, rngs):
        self.cfg = cfg
        shape = (cfg.num_embed, cfg.embed_dim)
        self.embed = nnx.Param(0.1 * jax.random.normal(rngs(), shape))
        self.blocks = nnx.List([Block(cfg, rngs) for _ in range(cfg.num_layers)])
        self.final_norm = RMSNorm(cfg.embed_dim)

    def __call__(self, tokens, start, cache):
        positions = start + jnp.arange(tokens.shape[1])
        x = self.embed[...][tokens] * self.cfg.embed_dim**0.5
        step = fp8kv.begin_step(*cache, fp8kv.dense_batch(tokens, start, cache[0]))
        for layer, block in enumerate(self.blocks):
            x, step = block(x, positions, layer, step)
        logits = self.final_norm(x[:, -1]) @ self.embed[...].T
        cap = self.cfg.final_logit_softcap
        return cap * jnp.tanh(logits / cap), fp8kv.end_step(step)


def init_cache(cfg, batch_size):
    config = fp8kv.CacheConfig(
        num_layers=cfg.num_layers,
        num_kv_heads=cfg.num_kv_heads,
        head_dim=cfg.head_dim,
        num_pages=batch_size * cfg.cache_len // PAGE_SIZE,
        page_size=PAGE_SIZE,
    )
    window = fp8kv.CalibrationConfig(window_tokens=48)
    longest = batch_size * cfg.cache_len
    state = fp8kv.init_calibration(window, config, max_tokens_per_step=longest)
    return fp8kv.init_cache(config), state


@nnx.jit(static_argnames="num_steps")
def sample(model, prompt, cache, num_steps):
    """Decodes greedily on the device; returns tokens, logits and the cache."""
    logits, cache = model(prompt, 0, cache)

    def body(carry, _):
        logits, position, cache = carry
        token = jnp.argmax(logits, axis=-1)
        new_logits, cache = model(token[:, None], position, cache)
        return (new_logits, position + 1, cache), (token, logits)

    carry = (logits, jnp.int32(prompt.shape[1]), cache)
    carry, (tokens, logits) = jax.lax.scan(body, carry, length=num_steps)
    return tokens.T, logits, carry[2]
