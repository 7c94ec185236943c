"""Tiles of the page kernels, checked against the shared memory of a block."""

import dataclasses

SHARED_MEMORY_BYTES = 227 * 1024
SUPPORTED_PAGE_SIZES = (64, 128)
SUPPORTED_HEAD_DIMS = (64, 128, 256)
TILE = 64  # rows and columns that a warpgroup transposes at once
# 1024 bytes for barriers and the alignment of swizzled tiles.
RESERVED_BYTES = 1024


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PageTileConfig:
    """What one program of `gather_sequences` keeps in shared memory.

    A program takes a whole head of a page of K and of V, so that all its reads are in
    flight at once. (`copy_pages` needs the first two of the three tiles.)

    Raises:
      ValueError: if that does not fit, or is no whole number of tiles.
    """

    page_size: int
    head_dim: int
    itemsize: int

    def __post_init__(self) -> None:
        if self.page_size % TILE or self.head_dim % TILE:
            raise ValueError(
                f"Expected page_size and head_dim to be multiples of {TILE}, the tile "
                f"a warpgroup transposes, got {self.page_size} and {self.head_dim}."
            )
        if self.gather_bytes > SHARED_MEMORY_BYTES:
            raise ValueError(
                f"Expected tiles of at most {SHARED_MEMORY_BYTES} bytes, got "
                f"{self.gather_bytes} for {self}."
            )

    @property
    def tiles_of_dims(self) -> int:
        return self.head_dim // TILE

    @property
    def tiles_of_tokens(self) -> int:
        return self.page_size // TILE

    @property
    def widens(self) -> bool:
        """Whether codes go through 16-bit tiles: 8-bit ones cannot be transposed."""
        return self.itemsize == 1

    @property
    def tile_bytes(self) -> int:
        return self.page_size * self.head_dim * self.itemsize

    @property
    def gather_bytes(self) -> int:
        """K, V as stored, V transposed, and two 16-bit tiles for 8-bit codes."""
        widened = 2 * TILE * TILE * 2 if self.widens else 0
        return 3 * self.tile_bytes + widened + RESERVED_BYTES


def heuristic_config(page_size: int, head_dim: int, itemsize: int) -> PageTileConfig:
    """Takes a head of a page at once, which fits for every supported shape."""
    return PageTileConfig(page_size=page_size, head_dim=head_dim, itemsize=itemsize)
