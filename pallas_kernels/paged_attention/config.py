"""Tuning of the Mosaic GPU kernels: what a split is, and what fits in a multiprocessor."""

import dataclasses

from pallas_kernels.paged_attention.problem import Problem

NUM_MULTIPROCESSORS = 132
# Of 228 KiB a multiprocessor lends 227 to one block, and keeps 1 for each.
SHARED_MEMORY_PER_MULTIPROCESSOR = 228 * 1024
SHARED_MEMORY_PER_BLOCK = 227 * 1024
_RESERVED_PER_BLOCK = 1024
# Barriers, scratch of reductions, and padding of allocations to a swizzle's 1,024 bytes.
_SLACK = 4 * 1024
_REGISTERS = 65536
_THREADS_PER_WARPGROUP = 128
_TWO_PASS_MAX_COLUMNS = 16


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How the split kernel works through a sequence.

    Attributes:
      two_pass: whether a split takes all its keys before its values. That needs no
        rescaling, and the logits of a whole split in shared memory; otherwise keys
        and values alternate with an online softmax.
      tiles_per_split: pages that one work item takes at most.
      num_stages: pages on their way from memory.
      num_blocks: blocks of the launch. Each walks its share of the work items.
    """

    two_pass: bool
    tiles_per_split: int
    num_stages: int
    num_blocks: int

    def __post_init__(self) -> None:
        for name in ("tiles_per_split", "num_stages", "num_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"Expected {name} >= 1, got {getattr(self, name)}.")

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of shared memory a block needs."""
        p = problem
        tiles = self.tiles_per_split if self.two_pass else 1
        ring = self.num_stages * p.page_size * p.head_dim * p.itemsize
        operand = p.operand_rows * p.head_dim * p.itemsize
        raw = 2 * p.num_columns * p.head_dim * p.q_dtype.itemsize
        logits = tiles * p.page_size * p.num_columns * 4 if self.two_pass else 1024
        weights = tiles * p.operand_rows * p.page_size * p.itemsize
        out = p.num_columns * p.head_dim * 4
        return ring + operand + raw + logits + max(weights, out) + _SLACK

    def tokens_per_split(self, problem: Problem) -> int:
        return self.tiles_per_split * problem.page_size

    def max_splits(self, problem: Problem) -> int:
        """Splits of the longest sequence that the block table can hold."""
        return -(-problem.max_tokens // self.tokens_per_split(problem))


def heuristic_config(problem: Problem) -> Config:
    """Picks a config that fits shared memory, from runs on an H200.

    Two passes for up to 16 columns, online softmax beyond, where registers leave room
    for one block. Splits are 1,024 tokens long (512 for 16 columns, 2,048 online), and
    shorter as long as a full block table leaves multiprocessors idle: 8 sequences of
    2,048 tokens take 256.
    """
    two_pass = problem.num_columns <= _TWO_PASS_MAX_COLUMNS
    blocks = _blocks_in_registers(problem) if two_pass else 1
    tokens = (1024 if problem.num_columns <= 8 else 512) if two_pass else 2048
    tiles = max(1, tokens // problem.page_size)
    heads = problem.num_seqs * problem.num_kv_heads
    pages = -(-problem.max_tokens // problem.page_size)
    while tiles > 2 and heads * -(-pages // tiles) < 2 * NUM_MULTIPROCESSORS:
        tiles //= 2
    config = Config(
        two_pass=two_pass,
        tiles_per_split=min(tiles, pages),
        num_stages=_enough_stages(problem, blocks),
        num_blocks=1,
    )
    config = _shrink_to_fit(config, problem, min(blocks, 2))
    per_block = config.shared_memory(problem) + _RESERVED_PER_BLOCK
    blocks = min(blocks, max(1, SHARED_MEMORY_PER_MULTIPROCESSOR // per_block))
    items = heads * config.max_splits(problem)
    return dataclasses.replace(
        config, num_blocks=max(1, min(items, blocks * NUM_MULTIPROCESSORS))
    )


def _blocks_in_registers(problem: Problem) -> int:
    """Estimates how many blocks of two passes a multiprocessor's registers hold.

    The values' loop needs most: the running sum and the next product. With 40 for the
    rest this gives 80 for FP8 of head_dim 128 and 8 columns, as the assembler does.
    """
    p = problem
    sums = 2 * p.head_dim * p.operand_rows + p.page_size * p.num_columns
    registers = 40 + sums // _THREADS_PER_WARPGROUP
    return max(1, min(3, _REGISTERS // (2 * _THREADS_PER_WARPGROUP * registers)))


def _enough_stages(problem: Problem, blocks: int) -> int:
    """Stages that cover the latency of memory: about 112 KiB in a multiprocessor."""
    tile = problem.page_size * problem.head_dim * problem.itemsize
    budget = 112 * 1024 if blocks == 1 else 48 * 1024
    return max(2, min(8 if blocks == 1 else 6, budget // tile))


def _shrink_to_fit(config: Config, problem: Problem, blocks: int) -> Config:
    """Halves splits, then drops stages, until the blocks fit a multiprocessor."""
    fit = SHARED_MEMORY_PER_MULTIPROCESSOR // blocks - _RESERVED_PER_BLOCK
    while config.two_pass and config.tiles_per_split > 2:
        if config.shared_memory(problem) <= fit:
            return config
        half = config.tiles_per_split // 2
        config = dataclasses.replace(config, tiles_per_split=half)
    while config.num_stages > 2 and config.shared_memory(problem) > fit:
        config = dataclasses.replace(config, num_stages=config.num_stages - 1)
    return config
