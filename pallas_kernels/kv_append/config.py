"""Tuning of kv_append: which tokens move as pieces of pages, and by how many programs."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels.pages.layout import PageGeometry

# Up to this many tokens a batch is taken for a decode step: one program a token.
DIRECT_TOKENS = 256
# Below this many tokens of a page writing them one by one moves less than pieces do.
# So many are also written at a time.
BLOCK_TOKENS = 8
# Tokens and columns of a piece of a page: 64 bfloat16 values are the widest row that a
# swizzle takes, and as many tokens make pieces of K and of V look alike.
PIECE = 64

_WARPS_PER_PROGRAM = 4
NUM_SMS = 132
SHARED_MEMORY_BYTES = 227 * 1024
# Beside its tiles: barriers, room for reductions, and the alignment of swizzled tiles.
_OTHER_BYTES = 4096
# 128 threads of at most 128 registers each, of the 65,536 registers of an SM.
_MAX_PROGRAMS_PER_SM = 4
# One piece arrives and one leaves while a third is quantized.
_MAX_STAGES = 3
# With so many programs for each one that the device holds, 65,536 tokens take 4 to 6 %
# less than with as many as it holds; with half as many, as long.
_MANY_WAVES = 12


def uses_page_tiles(num_tokens: int, page_size: int, wanted: bool | None) -> bool:
    """Says whether a batch moves as pieces: not if it is short, unless wanted."""
    # The rows of a piece are loaded at once, and no page is smaller than a piece.
    fits = num_tokens >= page_size
    return fits and (num_tokens > DIRECT_TOKENS if wanted is None else wanted)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AppendConfig:
    """How the Mosaic kernels cut their work into programs of one warpgroup.

    Attributes:
      heads_per_program: KV heads of one token that a program writes in a decode step;
        a power of two up to 4 gives each head its warp.
      num_stages: pieces of pages that a program has in flight in a longer batch.
      num_programs: programs that share the pieces of a longer batch; at least one for
        each head of K and of V.
      whole_pages: whether one program takes all pieces of a head's page in a row.
    """

    heads_per_program: int
    num_stages: int
    num_programs: int
    whole_pages: bool = False

    def __post_init__(self) -> None:
        if self.heads_per_program not in (1, 2, 4):
            raise ValueError(
                f"Expected {self.heads_per_program=} to be 1, 2 or 4: the warps of a "
                "program share its heads evenly."
            )
        if self.num_stages < 1 or self.num_programs < 1:
            raise ValueError(
                f"Expected {self.num_stages=} and {self.num_programs=} to be at "
                "least 1."
            )


def choose_config(
    num_tokens: int, geometry: PageGeometry, pool_dtype: Any, *, statistics: bool
) -> AppendConfig:
    """Chooses the config of a batch.

    A short batch has a program for each piece it may need, so that all are in flight
    at once. A longer one has as many as the device holds, with a ring each; a long
    one a program for each head of a page, but not with statistics, which every
    program has to reduce.
    """
    stage_bytes = PIECE**2 * (2 + jnp.dtype(pool_dtype).itemsize)
    # Half as many again as whole pages, for sequences that begin and end inside one.
    items = -(-3 * num_tokens // (2 * geometry.page_size)) + 8
    heads = 2 * geometry.num_kv_heads
    pieces = items * heads * geometry.page_size * geometry.head_dim // PIECE**2
    turns = -(-pieces // programs_at_once(stage_bytes))
    stages = min(turns, _MAX_STAGES)
    num_programs = min(pieces, programs_at_once(stages * stage_bytes))
    pages = num_tokens // geometry.page_size * heads
    whole_pages = not statistics and pages >= _MANY_WAVES * num_programs
    return AppendConfig(
        heads_per_program=math.gcd(geometry.num_kv_heads, _WARPS_PER_PROGRAM),
        num_stages=stages,
        num_programs=pages if whole_pages else num_programs,
        whole_pages=whole_pages,
    )


def programs_at_once(tile_bytes: int) -> int:
    """Counts the programs with such tiles that an H200 holds."""
    fits = SHARED_MEMORY_BYTES // (tile_bytes + _OTHER_BYTES)
    return NUM_SMS * min(fits, _MAX_PROGRAMS_PER_SM)
