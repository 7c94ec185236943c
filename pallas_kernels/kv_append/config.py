"""Tuning of kv_append: which tokens move as page tiles, and how programs are cut."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels.pages.layout import PageGeometry

# Up to this many tokens a batch is taken for a decode step: one program a token.
DIRECT_TOKENS = 256
# A tile reads and writes a whole page of each head; below this many tokens writing
# them one by one moves less. So many are also written at a time.
BLOCK_TOKENS = 8
# Columns of a page tile: 64 bfloat16 values are the widest row a swizzle takes.
TILE_COLUMNS = 64

_WARPS_PER_PROGRAM = 4
NUM_SMS = 132
SHARED_MEMORY_BYTES = 227 * 1024
# Beside its tiles: barriers, room for reductions, and the alignment of swizzled tiles.
_OTHER_BYTES = 4096
# 128 threads of 80 registers each, of the 65,536 registers of an SM.
_MAX_PROGRAMS_PER_SM = 6


def uses_page_tiles(num_tokens: int, page_size: int, wanted: bool | None) -> bool:
    """Says whether a batch moves as page tiles: not if it is short, unless wanted."""
    # The kernel loads a page's worth of rows at once, so there must be as many.
    fits = num_tokens >= page_size
    return fits and (num_tokens > DIRECT_TOKENS if wanted is None else wanted)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AppendConfig:
    """How the Mosaic kernels cut their work into programs of one warpgroup.

    Attributes:
      heads_per_program: KV heads of one token that a program writes in a decode step;
        a power of two up to 4 gives each head its warp.
      num_stages: page tiles that a program has in flight in a longer batch.
      num_programs: programs that share the tiles of a longer batch; at least one for
        each head of K and of V.
    """

    heads_per_program: int
    num_stages: int
    num_programs: int

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
    num_tokens: int, geometry: PageGeometry, pool_dtype: Any
) -> AppendConfig:
    """Chooses the config of a batch.

    A short batch has a program for each tile it may need, so that all are in flight
    at once. A long one has as many as the device holds, with a ring each.
    """
    tile = geometry.page_size * TILE_COLUMNS
    stage_bytes = tile * (2 + jnp.dtype(pool_dtype).itemsize)
    # Half as many again as whole pages, for sequences that begin and end inside one.
    items = -(-3 * num_tokens // (2 * geometry.page_size)) + 8
    tiles = items * 2 * geometry.num_kv_heads * geometry.head_dim // TILE_COLUMNS
    programs = programs_at_once(stage_bytes)
    stages = 1
    if tiles > programs:
        stages = 2
        programs = programs_at_once(stages * stage_bytes)
    return AppendConfig(
        heads_per_program=math.gcd(geometry.num_kv_heads, _WARPS_PER_PROGRAM),
        num_stages=stages,
        num_programs=max(1, min(tiles, programs)),
    )


def programs_at_once(tile_bytes: int) -> int:
    """Counts the programs with such tiles that an H200 holds."""
    fits = SHARED_MEMORY_BYTES // (tile_bytes + _OTHER_BYTES)
    return NUM_SMS * min(fits, _MAX_PROGRAMS_PER_SM)
