"""Sizes of a serving engine, and the compilation cache that it starts with."""

from dataclasses import dataclass
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from fp8kv_jax.serving.layout import Layout, buckets_up_to


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine, checked when built.

    Args:
      max_num_seqs: continuations that run at a time.
      max_seq_len: longest sequence, prompt and new tokens together.
      max_tokens_per_step: real tokens of a step at most: one for each continuation
        that decodes, and chunks of prompts in what is left. It bounds what a long
        prompt can add to the time between two tokens of everybody else.
      chunk: tokens of a prefill row. A long prompt takes several rows of a step.
      decode_buckets: heights that the decoding part of a step is padded to, ascending;
        None for a few from 8 to `max_num_seqs`.
      prefill_buckets: likewise of the prefill part, in rows; None for 1 and as many
        as the budget holds. A step of each pair of heights is compiled ahead.
      quick_start: two steps alone, the largest and that without prefill rows, and a
        warm-up in the background waits for the largest; the window is kept.
      prefix_sharing: finds pages by the tokens they hold.
      host_pages: pages of prefixes that went out of the pool and stay in host memory.
      compilation_cache: a folder where JAX keeps what it compiled, for the next
        start; None for none. It is a setting of the process.
    """

    max_num_seqs: int = 64
    max_seq_len: int = 4096
    max_tokens_per_step: int = 512
    chunk: int = 128
    decode_buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] | None = None
    quick_start: bool = False
    prefix_sharing: bool = True
    host_pages: int = 0
    compilation_cache: Path | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_seq_len", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"Expected {name} to be at least 1, got {getattr(self, name)}."
                )
        if self.max_tokens_per_step < self.max_num_seqs + self.chunk:
            raise ValueError(
                f"Expected max_tokens_per_step to be at least "
                f"{self.max_num_seqs + self.chunk} (max_num_seqs and one chunk), "
                f"got {self.max_tokens_per_step}: prompts would wait for ever."
            )
        if self.host_pages < 0:
            raise ValueError(
                f"Expected host_pages to be at least 0, got {self.host_pages}."
            )
        self._check_buckets("decode_buckets", self.max_num_seqs)
        self._check_buckets("prefill_buckets", 1)

    def _check_buckets(self, name: str, largest: int) -> None:
        buckets = getattr(self, name)
        if buckets is None:
            return
        ascending = all(a < b for a, b in zip((0, *buckets), buckets, strict=False))
        if not buckets or not ascending or buckets[-1] < largest:
            raise ValueError(
                f"Expected {name} to be ascending numbers of rows up to {largest} or "
                f"more, got {buckets}."
            )

    def layout(self, page_size: int) -> Layout:
        """The shapes of steps."""
        decode, prefill = self.decode_buckets, self.prefill_buckets
        if decode is None:
            smallest = min(8, self.max_num_seqs)
            decode = buckets_up_to(self.max_num_seqs, smallest=smallest, factor=4)
        if prefill is None:
            rows = -(-self.max_tokens_per_step // self.chunk)
            if self.quick_start:  # no row that holds next to nothing
                rows = self.max_tokens_per_step // self.chunk
            prefill = buckets_up_to(rows, smallest=1, factor=4)
        prefill = 0, *prefill
        if self.quick_start:
            decode, prefill = decode[-1:], (0, prefill[-1])
        return Layout(
            decode_buckets=decode,
            prefill_buckets=prefill,
            chunk=self.chunk,
            page_size=page_size,
            pages_per_seq=-(-self.max_seq_len // page_size),
        )


def use_compilation_cache(folder: Path) -> None:
    """Makes JAX keep all that this process compiles in a folder, and look there."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # A process that has compiled already has settled on having none.
    compilation_cache.reset_cache()
