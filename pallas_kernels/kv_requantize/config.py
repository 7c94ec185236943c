"""Tuning of the requantize kernels: how many programs share the work list."""

import dataclasses

SHARED_MEMORY_BYTES = 227 * 1024
# 128 threads of 80 registers each, of the 65,536 registers of an SM.
MAX_PROGRAMS_PER_SM = 6
SUPPORTED_PAGE_SIZES = (64, 128)
SUPPORTED_HEAD_DIMS = (64, 128, 256)
# Columns of a head that one work item moves: 128 bytes of BF16, the widest swizzle.
TILE_DIMS = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequantizeConfig:
    """How many programs walk the work list, on a device of `num_sms`.

    Raises:
      ValueError: if a program's tiles times the programs of an SM exceed its memory.
    """

    page_size: int
    num_sms: int = 132
    programs_per_sm: int

    def __post_init__(self) -> None:
        needed = self.programs_per_sm * tile_bytes(self.page_size)
        if not 1 <= self.programs_per_sm <= MAX_PROGRAMS_PER_SM or (
            needed > SHARED_MEMORY_BYTES
        ):
            raise ValueError(
                f"Expected {self.programs_per_sm=} in 1..{MAX_PROGRAMS_PER_SM} with "
                f"tiles of at most {SHARED_MEMORY_BYTES} bytes, got {needed}."
            )

    @property
    def num_programs(self) -> int:
        return self.num_sms * self.programs_per_sm


def tile_bytes(page_size: int) -> int:
    """Shared memory of one program: BF16 rows, and the codes of K or of V.

    1024 bytes more for barriers and the alignment of swizzled tiles.
    """
    return page_size * TILE_DIMS * (2 + 1) + 1024


def heuristic_config(page_size: int) -> RequantizeConfig:
    """Fills an SM with programs: each waits for its own copies, so more hide more."""
    fits = SHARED_MEMORY_BYTES // tile_bytes(page_size)
    return RequantizeConfig(
        page_size=page_size, programs_per_sm=min(fits, MAX_PROGRAMS_PER_SM)
    )
