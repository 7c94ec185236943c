"""Tuning of kv_append: which tokens move as page tiles, and how programs are cut."""

import dataclasses
import math

# Up to this many tokens a batch is taken for a decode step: one program a token.
DIRECT_TOKENS = 256
# A tile reads and writes a whole page of each head; below this many tokens writing
# them one by one moves less.
MIN_RUN_TOKENS = 8
# Columns of a page tile: 64 bfloat16 values are the widest row a swizzle takes.
TILE_COLUMNS = 64

_WARPS_PER_PROGRAM = 4


def num_page_items(num_tokens: int, page_size: int, page_tiles: bool | None) -> int:
    """Counts the rows of a plan's list of runs, 0 for a batch without tiles.

    Half as much again as whole pages need, for sequences that begin and end inside
    a page; runs past the list are written token by token.
    """
    if page_tiles is None:
        page_tiles = num_tokens > DIRECT_TOKENS
    # The kernel loads a page's worth of rows at once, so there must be as many.
    if not page_tiles or num_tokens < page_size:
        return 0
    whole_pages = -(-num_tokens // page_size)
    return whole_pages + whole_pages // 2 + 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AppendConfig:
    """How the Mosaic kernels cut their work into programs of one warpgroup.

    Attributes:
      heads_per_program: KV heads of one token that a program of the token kernel
        writes; a power of two up to 4 gives each head its warp.
      leftover_programs: programs, per group of heads, that share the tokens outside
        all page tiles. Each exits at once when there are none.
      v_row_bytes: bytes of one V row that a page program moves in one piece, 64 or
        128, the widest row that shared memory swizzles; 64 takes fewer registers.
    """

    heads_per_program: int
    leftover_programs: int
    v_row_bytes: int = 128

    def __post_init__(self) -> None:
        if self.heads_per_program not in (1, 2, 4):
            raise ValueError(
                f"Expected {self.heads_per_program=} to be 1, 2 or 4: the warps of a "
                "program share its heads evenly."
            )
        if self.v_row_bytes not in (64, 128):
            raise ValueError(f"Expected {self.v_row_bytes=} to be 64 or 128.")
        if self.leftover_programs < 1:
            raise ValueError(f"Expected {self.leftover_programs=} to be at least 1.")


def choose_config(num_tokens: int, num_kv_heads: int) -> AppendConfig:
    """Chooses the config for a batch: as many heads per program as divide evenly."""
    return AppendConfig(
        heads_per_program=math.gcd(num_kv_heads, _WARPS_PER_PROGRAM),
        leftover_programs=min(num_tokens, 256),
    )
