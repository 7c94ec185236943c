"""Tuning of absmax: how many rows a program holds, and how often."""

import dataclasses

# Values of 2 bytes that make up one load of 16 bytes, the widest there is.
VALUES_PER_LOAD = 8
THREADS = 128
# Programs that keep the memory of an H200 busy: 8 for each of its 132 SMs.
_ENOUGH_PROGRAMS = 1056
_MAX_ROWS = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AbsmaxConfig:
    """How the kernel cuts one head's rows into programs of one warpgroup.

    Attributes:
      rows: rows in registers at once, a multiple of what one load of all threads
        covers.
      steps: times that a program loads so many rows.
    """

    rows: int
    steps: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.steps < 1:
            raise ValueError(f"Expected {self.rows=} and {self.steps=} to be positive.")

    def check(self, num_tokens: int, head_dim: int) -> None:
        """Checks the config against a shape.

        Raises:
          ValueError: if it does not fit.
        """
        per_load = rows_per_load(head_dim)
        if self.rows > num_tokens or self.rows % per_load:
            raise ValueError(
                f"Expected {self.rows=} to be a multiple of {per_load}, the rows of one "
                f"load, and at most {num_tokens=}."
            )


def rows_per_load(head_dim: int) -> int:
    """Counts the rows that one 16-byte load of every thread covers."""
    return THREADS * VALUES_PER_LOAD // head_dim


def choose_config(num_tokens: int, num_kv_heads: int, head_dim: int) -> AbsmaxConfig:
    """Chooses many rows per program, but programs enough to fill the device.

    Fewer tokens than one load covers have to be padded to as many.
    """
    per_load = rows_per_load(head_dim)
    rows = min(_MAX_ROWS, num_tokens // per_load * per_load)
    tiles = -(-num_tokens // rows)
    return AbsmaxConfig(
        rows=rows, steps=max(1, min(8, tiles * num_kv_heads // _ENOUGH_PROGRAMS))
    )
