"""The slices of a workload, and which of them each token belongs to."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from fp8kv_jax.drift.result_range import Dimension
from fp8kv_jax.drift.workload import Tally

# Generated tokens fall into 1-16, 17-64, ..., and what lies beyond the last.
GENERATED_ENDS = (16, 64, 256, 1024)
PROMPT = "prompt"
# Each token belongs to one slice of each dimension.
NUM_DIMENSIONS = 5


@dataclass(frozen=True, kw_only=True)
class SliceTable:
    """All slices, numbered; the first is everything.

    Attributes:
      names: dimension and name of each.
      length_ends: the longest prompt of each slice by prompt length.
    """

    names: tuple[tuple[Dimension, str], ...]
    length_ends: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.names)

    def of_tokens(
        self,
        *,
        data_class: str,
        language: str,
        prompt_length: int,
        positions: Int32[np.ndarray, "num_tokens"],
    ) -> Int32[np.ndarray, "num_tokens dimensions"]:
        """Slices of some tokens of one sequence, given by their positions.

        The token at position `prompt_length` is the first generated one.
        """
        fixed = (
            ("class", data_class),
            ("language", language),
            ("prompt_length", self._length_name(prompt_length)),
        )
        ids = np.zeros((len(positions), NUM_DIMENSIONS), np.int32)
        for column, name in enumerate(fixed, 1):
            ids[:, column] = self.names.index(name)
        generated = positions - prompt_length + 1
        place = np.searchsorted(GENERATED_ENDS, np.maximum(generated, 1))
        first = self.names.index(("generation_position", PROMPT))
        ids[:, 4] = np.where(generated < 1, first, first + 1 + place)
        return ids

    def _length_name(self, length: int) -> str:
        place = int(np.searchsorted(self.length_ends, length))
        return interval_names(self.length_ends)[min(place, len(self.length_ends) - 1)]


def make_slices(tally: Tally, *, max_new_tokens: int) -> SliceTable:
    """Lays out the slices of a workload.

    Prompt lengths are cut at the 25th, 50th and 95th percentile and the maximum, so
    that the slices are the short prompts, the middle, the long ones and the longest.

    Args:
      tally: what the workload holds.
      max_new_tokens: tokens that are generated after a prompt at most.
    """
    percentiles = (tally.percentile(share) for share in (0.25, 0.5, 0.95, 1))
    ends = tuple(sorted(set(percentiles)))
    names: list[tuple[Dimension, str]] = [("overall", "all")]
    names += [("class", name) for name in tally.classes]
    names += [("language", name) for name in tally.languages]
    names += [("prompt_length", name) for name in interval_names(ends)]
    names += [("generation_position", name) for name in _positions(max_new_tokens)]
    return SliceTable(names=tuple(names), length_ends=ends)


def interval_names(ends: tuple[int, ...]) -> list[str]:
    """Names of the intervals that end at some numbers: (16, 64) -> 1-16, 17-64."""
    starts = (1, *(end + 1 for end in ends))
    pairs = zip(starts, ends, strict=False)
    return [f"{a}-{b}" if a < b else str(b) for a, b in pairs]


def _positions(max_new_tokens: int) -> list[str]:
    if not max_new_tokens:
        return [PROMPT]
    num_ends = 1 + int(np.searchsorted(GENERATED_ENDS, max_new_tokens))
    names = interval_names(GENERATED_ENDS)[:num_ends]
    if num_ends > len(GENERATED_ENDS):
        names.append(f"{GENERATED_ENDS[-1] + 1}+")
    return [PROMPT, *names]
