"""Tuning of the Mosaic GPU kernels: what a split is, and what fits in a multiprocessor."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.paged_attention.problem import Problem

NUM_MULTIPROCESSORS = 132
# Of 228 KiB a multiprocessor lends 227 to one block, and keeps 1 for each.
SHARED_MEMORY_PER_MULTIPROCESSOR = 228 * 1024
SHARED_MEMORY_PER_BLOCK = 227 * 1024
_RESERVED_PER_BLOCK = 1024
# Barriers, scratch of reductions, and padding of allocations to a swizzle's 1,024 bytes.
_SLACK = 4 * 1024
# Smaller tiles, of FP8, are taken two pages at once.
_TILE_BYTES = 16 * 1024
_PASS_TOKENS = 512
_MAX_STAGES = 8
# More columns take more than half of the registers, where a block runs alone; so does
# a mask by query of as many.
_TWO_BLOCKS_MAX_COLUMNS = 16


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How the split kernel works through a sequence.

    Attributes:
      pages_per_tile: pages that are copied and multiplied at once.
      tiles_per_pass: tiles whose keys a block takes before it takes their values. The
        logits of a pass stand in shared memory; those of a single tile in registers.
      num_stages: tiles on their way from memory.
      num_blocks: blocks of the launch, which share all tiles evenly.
    """

    pages_per_tile: int
    tiles_per_pass: int
    num_stages: int
    num_blocks: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"Expected {field.name} >= 1, got {getattr(self, field.name)}."
                )

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of shared memory a block needs."""
        p, tiles, tokens = problem, self.tiles_per_pass, self.tile_tokens(problem)
        ring = self.num_stages * tokens * p.head_dim * p.itemsize
        operand = p.operand_rows * p.head_dim * p.itemsize
        raw = 2 * p.num_columns * p.head_dim * p.q_dtype.itemsize
        logits = tiles * tokens * p.num_columns * 4 if tiles > 1 else 1024
        weights = tiles * p.operand_rows * tokens * p.itemsize
        out = p.num_columns * p.head_dim * 4
        return ring + operand + raw + logits + max(weights, out) + _SLACK

    def fits(self, problem: Problem, blocks: int) -> bool:
        """Whether so many blocks fit the shared memory of a multiprocessor."""
        needed = self.shared_memory(problem)
        if needed > SHARED_MEMORY_PER_BLOCK:
            return False
        return (
            blocks * (needed + _RESERVED_PER_BLOCK) <= SHARED_MEMORY_PER_MULTIPROCESSOR
        )

    def tile_tokens(self, problem: Problem) -> int:
        return self.pages_per_tile * problem.page_size

    def max_splits(self, problem: Problem) -> int:
        """Splits of one head of the longest sequence that the block table can hold."""
        tiles = -(-problem.max_tokens // self.tile_tokens(problem))
        return min(tiles, self.num_blocks)

    def num_places(self, problem: Problem) -> int:
        """Splits of all heads of all sequences at most, counted with gaps."""
        return self.num_blocks + problem.num_seqs * problem.num_kv_heads - 1


class ShapeClass(NamedTuple):
    """What tuning depends on; lengths and their number, the kernel evens out."""

    fp8: bool
    head_dim: int
    page_size: int
    num_columns: int
    several_queries: bool

    @classmethod
    def of(cls, problem: Problem) -> "ShapeClass":
        p, several = problem, problem.num_queries > 1
        return cls(p.fp8, p.head_dim, p.page_size, p.num_columns, several)


class Tuning(NamedTuple):
    """A config's fields, the blocks by multiprocessor."""

    pages_per_tile: int
    tiles_per_pass: int
    num_stages: int
    blocks_per_multiprocessor: int


# Picked by hand from sweeps over what fits: `python -m benchmarks.tune_paged_attention`
# makes such a sweep.
TUNED: dict[str, dict[ShapeClass, Tuning]] = {
    "NVIDIA H200": {
        ShapeClass(True, 128, 128, 8, False): Tuning(1, 8, 3, 2),
        ShapeClass(True, 128, 128, 16, False): Tuning(1, 4, 3, 2),
        # 129 registers with passes of several tiles: too many for two blocks.
        ShapeClass(True, 128, 128, 16, True): Tuning(1, 1, 5, 2),
        ShapeClass(True, 128, 128, 32, True): Tuning(1, 1, 7, 1),
        ShapeClass(True, 128, 64, 8, False): Tuning(2, 1, 6, 2),
        ShapeClass(True, 64, 128, 8, False): Tuning(1, 8, 6, 2),
        ShapeClass(True, 256, 128, 8, False): Tuning(1, 4, 2, 2),
        ShapeClass(False, 128, 128, 8, False): Tuning(1, 1, 3, 2),
    },
}


def pick_config(problem: Problem, device_kind: str) -> Config:
    """Picks the tuned config of a shape's class, or one by heuristic.

    A class of several queries that has none takes that of one query.
    """
    shape, table = ShapeClass.of(problem), TUNED.get(device_kind, {})
    tuning = table.get(shape) or table.get(shape._replace(several_queries=False))
    if tuning is not None:
        config = config_of(problem, tuning)
        # Queries of float32 take more shared memory than those that were tuned for.
        if config.fits(problem, tuning.blocks_per_multiprocessor):
            return config
    return heuristic_config(problem)


def config_of(problem: Problem, tuning: Tuning) -> Config:
    """Launches no more blocks than the block table has tiles."""
    config = Config(
        pages_per_tile=tuning.pages_per_tile,
        tiles_per_pass=tuning.tiles_per_pass,
        num_stages=tuning.num_stages,
        num_blocks=tuning.blocks_per_multiprocessor * NUM_MULTIPROCESSORS,
    )
    tiles = -(-problem.max_tokens // config.tile_tokens(problem))
    tiles *= problem.num_seqs * problem.num_kv_heads
    return dataclasses.replace(config, num_blocks=max(1, min(tiles, config.num_blocks)))


def heuristic_config(problem: Problem) -> Config:
    """Picks a config that fits shared memory, after the tuned ones.

    Tiles of about 16 KiB, and as many stages as fit. Passes of 512 tokens where two
    blocks fit the registers of a multiprocessor, one tile at a time beyond.
    """
    p = problem
    small = p.page_size * p.head_dim * p.itemsize < _TILE_BYTES
    pages = 2 if small and p.fp8 else 1
    masks = 2 if p.num_queries > 1 else 1
    two_blocks = p.num_columns * masks <= _TWO_BLOCKS_MAX_COLUMNS
    blocks = 2 if two_blocks else 1
    passes = max(1, _PASS_TOKENS // (pages * p.page_size)) if two_blocks else 1
    tuning = Tuning(pages, passes, _MAX_STAGES, blocks)
    while not config_of(p, tuning).fits(p, blocks):
        if tuning.num_stages > 3:
            tuning = tuning._replace(num_stages=tuning.num_stages - 1)
        elif tuning.tiles_per_pass > 1:
            tuning = tuning._replace(tiles_per_pass=tuning.tiles_per_pass // 2)
        elif tuning.num_stages > 2:
            tuning = tuning._replace(num_stages=2)
        else:
            break
    return config_of(p, tuning)
