"""Two artifacts on the same load: tokens per second and what a user waits for."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float64

from fp8kv_jax.calibration import CalibrationConfig
from fp8kv_jax.decode import Forward
from fp8kv_jax.drift.compare import Candidate
from fp8kv_jax.drift.compare_result import Bounds, Measure, judge
from fp8kv_jax.drift.compare_statistics import paired_bootstrap
from fp8kv_jax.generation import GenerationConfig, Generator, Token
from pallas_kernels.dispatch import Implementation

type Clock = Callable[[], float]

# What is summed up of each round, of A and then of B: requests, output tokens, seconds,
# seconds to the first token, requests with more tokens, and their seconds a token.
_PER_SIDE = 6


class PairedTiming:
    """Generates for the same prompts with A and with B in turn.

    A round is a few prompts that are served together, once by each, one directly after
    the other; who goes first alternates. Outputs have a fixed length, so that both get
    the same load.

    Args:
      forward: the model.
      params: its parameters.
      candidates: the two artifacts.
      prompts: token ids of each prompt.
      max_new_tokens: length of each output.
      concurrency: prompts in a round.
      clock: seconds.
      implementation: which kernels to use; None for the best that works.

    Attributes:
      rows: what the rounds took.
    """

    def __init__(
        self,
        forward: Forward,
        params: Any,
        candidates: tuple[Candidate, Candidate],
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        concurrency: int,
        clock: Clock = time.perf_counter,
        implementation: Implementation | None = None,
    ) -> None:
        num_seqs = min(concurrency, len(prompts))
        longest = max(map(len, prompts)) + max_new_tokens
        self.rows: list[np.ndarray] = []
        self._clock = clock
        self._config = GenerationConfig(max_new_tokens=max_new_tokens)
        self._groups = [
            prompts[start : start + num_seqs]
            for start in range(0, len(prompts), num_seqs)
        ]
        pages_per_seq = -(-longest // candidates[0].cache.page_size)
        self._generators = [
            Generator(
                forward,
                params,
                replace(x.cache, num_pages=num_seqs * pages_per_seq),
                CalibrationConfig(window_tokens=0),
                num_seqs=num_seqs,
                max_seq_len=longest,
                scales=x.scales,
                prefill_chunks=(128,),
                implementation=implementation,
            )
            for x in candidates
        ]

    def num_runs(self, repeats: int) -> int:
        """How many runs of a group there will be, the warm-up's included."""
        return 2 * (1 + repeats * len(self._groups))

    def run(self, repeats: int) -> Iterator[int]:
        """Runs all groups some times; yields the number of runs so far."""
        for generator in self._generators:  # compiles, and is not counted
            self._time(generator, self._groups[0])
        num_runs = 2
        yield num_runs
        for index in range(repeats * len(self._groups)):
            # Each group goes first with A in one repeat and with B in the next.
            group, repeat = index % len(self._groups), index // len(self._groups)
            order = (0, 1) if (group + repeat) % 2 == 0 else (1, 0)
            taken = {}
            for side in order:
                taken[side] = self._time(self._generators[side], self._groups[group])
                num_runs += 1
                yield num_runs
            self.rows.append(np.concatenate([taken[0], taken[1]]))

    def _time(
        self, generator: Generator, group: Sequence[Sequence[int]]
    ) -> Float64[np.ndarray, "6"]:
        """Serves a group; all of its prompts arrive at the start."""
        seen: dict[int, list[float]] = {i: [] for i in range(len(group))}
        started = self._clock()
        for event in generator.generate(group, self._config):
            if isinstance(event, Token):
                seen[event.sequence].append(self._clock())
        ended = self._clock()
        firsts = [times[0] - started for times in seen.values()]
        rates = [
            (times[-1] - times[0]) / (len(times) - 1)
            for times in seen.values()
            if len(times) > 1
        ]
        num_tokens = sum(map(len, seen.values()))
        seconds = ended - started
        sums = (len(group), num_tokens, seconds, sum(firsts), len(rates), sum(rates))
        return np.array(sums, np.float64)


def judge_timing(
    rows: Float64[np.ndarray, "num_rounds columns"],
    bounds: Bounds,
    *,
    draws: int,
    seed: int,
) -> list[Measure]:
    """Compares output tokens per second, time to the first token, and time a token."""

    def quotient(above: int, below: int):
        def both(sums: Float64[np.ndarray, "*draws columns"]) -> tuple:
            return tuple(
                sums[..., start + above] / sums[..., start + below]
                for start in (0, _PER_SIDE)
            )

        return both

    bootstrap = functools.partial(
        paired_bootstrap, rows, change="relative", draws=draws, seed=seed
    )
    shared: dict[str, Any] = {"change_kind": "relative", "bound": bounds.speed}
    measures = [
        judge(
            bootstrap(quotient(1, 2)),
            name="tokens_per_s",
            unit="1/s",
            higher_is_better=True,
            **shared,
        ),
        judge(
            bootstrap(quotient(3, 0)), name="time_to_first_token", unit="s", **shared
        ),
    ]
    if rows[:, 4].all():
        figures = bootstrap(quotient(5, 4))
        name = "time_per_output_token"
        measures.append(judge(figures, name=name, unit="s", **shared))
    return measures
