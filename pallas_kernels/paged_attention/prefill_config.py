"""Tuning of chunked prefill: tiles of the products, and what fits shared memory."""

import dataclasses

from pallas_kernels.paged_attention.config import NUM_MULTIPROCESSORS
from pallas_kernels.paged_attention.problem import Problem

# A warpgroup's product has 64 rows: queries of one head.
ROWS = 64
NUM_CONSUMERS = 2
# Barriers, scratch of reductions, and padding of allocations to a swizzle's 1,024 bytes.
_SLACK = 2 * 1024
_OPERAND_BYTES = 2
# Blocks of the gathering kernel that a multiprocessor's registers hold.
_GATHERING_AT_ONCE = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrefillConfig:
    """How the prefill kernels work through a sequence.

    Attributes:
      block_kv: tokens of one step of the online softmax.
      num_blocks: blocks that attend. Each walks its share of the tiles of queries.
      gather_blocks: blocks that gather pages before.
      num_stages: tiles of K, and as many of V, on their way from memory.
      weights_in_registers: whether the weights enter the second product from
        registers, which lets it run during the next step's softmax. Through shared
        memory the kernel is slower and can be interpreted.
    """

    block_kv: int
    num_blocks: int
    gather_blocks: int
    num_stages: int = 2
    weights_in_registers: bool = True

    def __post_init__(self) -> None:
        if self.block_kv not in (64, 128):
            raise ValueError(f"Expected block_kv to be 64 or 128, got {self.block_kv}.")
        for name, low in (("num_blocks", 1), ("gather_blocks", 1), ("num_stages", 2)):
            if getattr(self, name) < low:
                raise ValueError(
                    f"Expected {name} >= {low}, got {getattr(self, name)}."
                )

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of shared memory a block needs."""
        ring = 2 * self.num_stages * self.block_kv * problem.head_dim
        queries = query_slots(problem) * NUM_CONSUMERS * ROWS * problem.head_dim
        weights = NUM_CONSUMERS * ROWS * self.block_kv
        if self.weights_in_registers:
            weights = 0
        return _OPERAND_BYTES * (ring + queries + weights) + _SLACK

    def max_tiles(self, problem: Problem) -> int:
        """Tiles that the tokens which a sequence's queries see can touch."""
        p = problem
        tiles = -(-p.capacity // self.block_kv)
        if p.sliding_window is None:
            return tiles
        seen = p.sliding_window + p.num_queries - 1
        return min(tiles, -(-seen // self.block_kv) + 1)


def heads_per_block(problem: Problem) -> int:
    """The consumers take two heads of a KV head, or two tiles of queries of one."""
    return 1 if problem.group_size % NUM_CONSUMERS else NUM_CONSUMERS


def query_slots(problem: Problem) -> int:
    """Tiles of queries in shared memory: the next one too, where it fits."""
    return 2 if problem.head_dim <= 128 else 1


def queries_per_block(problem: Problem) -> int:
    return ROWS * NUM_CONSUMERS // heads_per_block(problem)


def num_items(problem: Problem) -> int:
    """Tiles of queries: what the blocks share out among them."""
    p = problem
    heads = p.num_kv_heads * p.group_size // heads_per_block(p)
    return p.num_seqs * heads * -(-p.num_queries // queries_per_block(p))


def heuristic_config(problem: Problem) -> PrefillConfig:
    """Picks tiles whose accumulators fit the registers, and a block per multiprocessor.

    A thread holds `head_dim / 2` sums of the output, and of `block_kv` tokens as many
    logits in float32 and weights in two bytes.
    """
    return PrefillConfig(
        block_kv=128 if problem.head_dim <= 128 else 64,
        num_blocks=NUM_MULTIPROCESSORS,
        gather_blocks=_GATHERING_AT_ONCE * NUM_MULTIPROCESSORS,
    )
