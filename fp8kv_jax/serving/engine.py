"""A serving engine: requests in, tokens out, one step at a time.

    engine = Engine(
        forward,
        params,
        CacheConfig(num_layers=30, num_kv_heads=3, head_dim=64, num_pages=512),
        CalibrationConfig(window_tokens=256),
        EngineConfig(max_num_seqs=32, max_seq_len=4096),
        eos_ids={2},
        detokenizer=tokenizer.stream_decoder,
    )
    engine.warm_up()
    request_id = engine.add(Request(prompt=ids, params=SamplingParams(max_tokens=64)))
    while engine.has_work:
        for output in engine.step():
            print(output.text, end="")

Everything is called from one thread. A server keeps the engine in a thread of its own
and hands it what to add and to abort between two steps.
"""

import secrets
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Self

import jax

from fp8kv_jax.cache import CacheConfig
from fp8kv_jax.calibration import (
    CalibrationConfig,
    CalibrationState,
    init_calibration,
)
from fp8kv_jax.decode import Forward
from fp8kv_jax.parallel import Placement, make_cache
from fp8kv_jax.scales.scale_set import ScaleSet
from fp8kv_jax.serving.choosing import Choice, Chosen
from fp8kv_jax.serving.engine_config import EngineConfig, use_compilation_cache
from fp8kv_jax.serving.host_pages import HostPages
from fp8kv_jax.serving.page_pool import PagePool, root_key
from fp8kv_jax.serving.request import (
    FinishReason,
    Output,
    Request,
    Stats,
    TokenLogprobs,
)
from fp8kv_jax.serving.runner import Runner, blank_rows
from fp8kv_jax.serving.scheduler import Scheduler
from fp8kv_jax.serving.sequence import Sequence
from fp8kv_jax.serving.text import Detokenizer, TextStream
from pallas_kernels.dispatch import Implementation


class _UnderWay(NamedTuple):
    """A step on the device, and the rows that get a token from it."""

    chosen: Chosen
    ready: list[tuple[int, Sequence]]


class Engine:
    """Continuous batching over one paged cache that calibrates itself.

    Args:
      forward: the model; see `fp8kv_jax.decode.Forward`. It is called with one row of
        tokens, `[1, num_tokens]`, and `logits_at` names some of them.
      params: its parameters.
      cache_config: sizes and dtypes of the cache.
      calibration_config: how scales are found.
      config: sizes of the engine.
      scales: scales that are known already, of the layers that do not calibrate.
      eos_ids: tokens that end a continuation.
      detokenizer: makes a decoder for one continuation, with `push(token_id) -> str`
        and `flush() -> str`; `Tokenizer.stream_decoder` is one. Without it, outputs
        hold no text and stop strings are refused.
      implementation: which kernels to use; None for the best that works.
      placement: how heads lie on a mesh without a data axis, where `params` lie
        already; None for one device.

    Raises:
      ValueError: if the placement has a data axis.
    """

    def __init__(
        self,
        forward: Forward,
        params: Any,
        cache_config: CacheConfig,
        calibration_config: CalibrationConfig,
        config: EngineConfig,
        *,
        scales: ScaleSet | None = None,
        eos_ids: Collection[int] = (),
        detokenizer: Callable[[], Detokenizer] | None = None,
        implementation: Implementation | None = None,
        placement: Placement | None = None,
    ) -> None:
        if placement is not None and placement.num_data > 1:
            raise ValueError(
                f"Expected a placement without a data axis, got {placement.num_data} "
                "along it: run an engine for each replica, with one artifact of scales."
            )
        if config.compilation_cache is not None:
            use_compilation_cache(config.compilation_cache)
        self.config = config
        self.cache_config = cache_config
        layout = config.layout(cache_config.page_size)
        calibration = init_calibration(
            calibration_config,
            cache_config,
            max_tokens_per_step=layout.max_tokens_per_step,
            scales=scales,
        )
        self.runner = Runner(
            forward,
            params,
            make_cache(cache_config, placement),
            calibration,
            layout,
            quick_start=config.quick_start,
            implementation=implementation,
            placement=placement,
        )
        self.host_pages = HostPages(config.host_pages, self.runner)
        self.pool = PagePool(cache_config.num_pages, on_evict=self.host_pages.save)
        self.scheduler = Scheduler(
            self.pool,
            page_size=cache_config.page_size,
            max_num_seqs=config.max_num_seqs,
            max_tokens_per_step=config.max_tokens_per_step,
            chunk=config.chunk,
            max_prefill_rows=layout.prefill_buckets[-1],
            prefix_sharing=config.prefix_sharing,
            outside=self.host_pages,
        )
        self._eos_ids = frozenset(eos_ids)
        self._detokenizer = detokenizer
        self._next_id = 0
        self._requests: dict[int, list[Sequence]] = {}
        # Steps that run and whose tokens have not been read, the oldest first.
        self._under_way: deque[_UnderWay] = deque()
        self._unsent: list[Output] = []
        self._counts = dict.fromkeys(_COUNTERS, 0)

    @property
    def has_work(self) -> bool:
        """Whether `step` would return anything, now or later."""
        return bool(self._requests or self._unsent)

    @property
    def calibration(self) -> CalibrationState:
        """Scales and counters as of the newest step; the next one gives them up."""
        return self.runner.calibration

    def warm_up(self, *, greedy_only: bool = False, background: bool = False) -> None:
        """Compiles every shape of a step and runs each on nothing.

        Warm-up batches carry slot -1 everywhere: they are neither written, observed
        nor counted. The steps that follow the window are among them, since a
        compilation slows whatever runs beside it (on a GPU it times kernels); once
        the scales are frozen, the engine goes on with those and frees the window.
        Without this call, steps are compiled when they are needed first.

        Args:
          greedy_only: leaves draws and log-probabilities to the first request that
            asks for them.
          background: waits for what the first greedy step needs; the rest compiles
            while the engine serves, and the window stays until it is there.
        """
        self._settle()
        offloads = self.config.host_pages > 0
        self.runner.warm_up(
            greedy_only=greedy_only, offloads=offloads, background=background
        )

    @property
    def compiled(self) -> tuple[int, int]:
        """How many of the steps that `warm_up` waits for are there, and of how many.

        May be read in any thread.
        """
        return self.runner.compiled

    def close(self) -> None:
        """Stops what still compiles in the background."""
        self.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, request: Request) -> int:
        """Queues a request; returns its id.

        Raises:
          ValueError: if it can never run: too long for `max_seq_len` or for the pool,
            a negative token, stop strings without a detokenizer.
        """
        max_len = self._check(request)
        params = request.params
        seed = secrets.randbits(32) if params.seed is None else params.seed
        request_id = self._next_id
        self._next_id += 1
        root = root_key(request.salt)
        sequences: list[Sequence] = []
        for index in range(params.n):
            text = None
            if self._detokenizer is not None:
                text = TextStream(self._detokenizer(), params.stop)
            sequence = Sequence(
                request_id=request_id,
                index=index,
                params=params,
                seed=seed,
                tokens=list(map(int, request.prompt)),
                num_prompt=len(request.prompt),
                max_len=max_len,
                keys=[root],
                parent=sequences[0] if sequences else None,
                text=text,
            )
            sequences.append(sequence)
            self.scheduler.add(sequence)
        self._requests[request_id] = sequences
        return request_id

    def _check(self, request: Request) -> int:
        """Returns the length at which the continuations end."""
        prompt, params, config = request.prompt, request.params, self.config
        if params.stop and self._detokenizer is None:
            raise ValueError(
                "Expected no stop strings: this engine has no detokenizer. Use "
                "stop_ids, or give the engine one."
            )
        if min(prompt) < 0:
            raise ValueError(
                f"Expected token ids from 0 on in the prompt, got {min(prompt)}."
            )
        num_new = params.max_tokens
        if num_new is None:
            num_new = max(1, config.max_seq_len - len(prompt))
        # The last token is never put into the cache.
        num_slots = self.cache_config.num_slots
        longest = min(config.max_seq_len, num_slots + 1)
        if len(prompt) + num_new > longest:
            raise ValueError(
                f"Expected at most {longest} tokens (max_seq_len {config.max_seq_len}, "
                f"pool of {num_slots} slots), got a prompt of {len(prompt)} and "
                f"max_tokens {num_new}."
            )
        return len(prompt) + num_new

    def abort(self, request_id: int) -> bool:
        """Ends a request; its pages are free at once.

        The next step returns an output with finish reason "abort" for each of its
        continuations that had not ended.

        Returns:
          Whether there was such a request under way.
        """
        sequences = self._requests.get(request_id)
        if sequences is None:
            return False
        for sequence in list(sequences):
            self._finish(sequence)
            self._counts["num_aborted"] += 1
            self._unsent.append(self._output(sequence, finish_reason="abort"))
        return True

    def step(self) -> list[Output]:
        """Returns what the continuations got in one step of the model.

        Waits for that step alone: the one after it is on the device by then, and
        begins with tokens that the host has not seen. A continuation that turns out
        to have ended (an end token, a stop string, an abort) has a row there that is
        computed in vain.

        Returns nothing, at once, without work, and when no step was under way before.
        The order is that of the continuations in the step. Each appears at most once,
        except after `reset`, which leaves the tokens of the step under way.
        """
        outputs, self._unsent = self._unsent, []
        begun = self._begin_step()
        if self._under_way and not (begun and len(self._under_way) == 1):
            outputs += self._end_step()
        return outputs

    def _begin_step(self) -> bool:
        """Sends a step to the device, if any continuation has a token for it."""
        self.runner.release_if_ready()
        plan = self.scheduler.plan()
        if not plan.num_tokens:
            return False
        self.runner.copy_pages(plan.page_copies)
        shape = self.runner.shape_of(plan)
        logits = self.runner.run(plan, shape)
        self._counts["num_steps"] += 1
        self._counts["num_computed_tokens"] += plan.num_tokens
        self._counts["num_page_copies"] += len(plan.page_copies)
        ready = [*enumerate(plan.decode)]
        ready += enumerate(plan.prefill, shape.decode_rows)
        ready = [(row, chunk.sequence) for row, chunk in ready if chunk.is_last]
        self._under_way.append(_UnderWay(self._choose(logits, ready), ready))
        self.scheduler.advance(plan)
        for row, sequence in ready:
            sequence.tokens.append(~row)
        return True

    def _end_step(self) -> list[Output]:
        """Waits for the oldest step under way; what has ended since gets nothing."""
        chosen, ready = self._under_way.popleft()
        chosen = jax.device_get(chosen)
        return [
            self._take(sequence, chosen, row)
            for row, sequence in ready
            if sequence in self._requests.get(sequence.request_id, ())
        ]

    def _settle(self) -> None:
        """Reads all steps under way; the next call of `step` returns what they gave."""
        while self._under_way:
            self._unsent += self._end_step()

    def _choose(self, logits: jax.Array, ready: list[tuple[int, Sequence]]) -> Chosen:
        """Chooses a token for some rows of a step, on the device."""
        rows = blank_rows(logits.shape[0])
        for row, sequence in ready:
            params = sequence.params
            rows.seeds[row] = sequence.seed
            rows.indices[row] = sequence.index
            rows.positions[row] = len(sequence.tokens)
            rows.temperatures[row] = params.temperature
            rows.top_ps[row] = params.top_p
        params = [sequence.params for _, sequence in ready]
        choice = Choice(
            draws=any(p.temperature > 0 for p in params),
            nucleus=any(p.temperature > 0 and p.top_p < 1 for p in params),
            logprobs=any(p.logprobs is not None for p in params),
        )
        return self.runner.choose(logits, rows, choice)

    def _take(self, sequence: Sequence, chosen: Chosen, row: int) -> Output:
        """Gives a sequence its next token, and ends the sequence if it is time."""
        token_id = int(chosen.token_ids[row])
        params, text = sequence.params, sequence.text
        sequence.tokens[sequence.num_known] = token_id
        self._counts["num_output_tokens"] += 1
        reason: FinishReason | None = None
        stop_reason: str | int | None = None
        said = ""
        if token_id in params.stop_ids:
            reason, stop_reason = "stop", token_id
        elif token_id in self._eos_ids and not params.ignore_eos:
            reason = "stop"
        elif text is not None:
            said = text.push(token_id)
            if text.stopped_by is not None:
                reason, stop_reason = "stop", text.stopped_by
        if reason is None and sequence.num_known >= sequence.max_len:
            reason = "length"
        if reason is not None:
            self._finish(sequence)
            if text is not None:
                said += text.finish()
        return self._output(
            sequence,
            token_ids=(token_id,),
            text=said,
            logprobs=_logprobs(chosen, row, params.logprobs),
            finish_reason=reason,
            stop_reason=stop_reason,
        )

    def _output(self, sequence: Sequence, **fields: Any) -> Output:
        return Output(
            request_id=sequence.request_id,
            index=sequence.index,
            num_prompt_tokens=sequence.num_prompt,
            num_cached_tokens=sequence.num_cached or 0,
            num_output_tokens=sequence.num_new,
            **fields,
        )

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self._counts["num_finished"] += 1
        sequences = self._requests[sequence.request_id]
        sequences.remove(sequence)
        if not sequences:
            del self._requests[sequence.request_id]

    def stats(self) -> Stats:
        """Counts queue, pages, calibration and tokens, without waiting for anything."""
        return Stats(
            num_waiting=len(self.scheduler.waiting),
            num_running=len(self.scheduler.running),
            num_pages=self.pool.num_pages,
            num_used_pages=self.pool.num_used,
            num_cached_pages=self.pool.num_idle,
            num_host_pages=len(self.host_pages),
            calibrates=bool(self.calibration.calibrating_layers),
            tokens_seen=self.runner.tokens_seen,
            window_tokens=self.runner.window_tokens,
            frozen=self.runner.frozen,
            has_window=self.runner.has_window,
            epoch=self.runner.epoch,
            num_prompt_tokens=self.scheduler.num_prompt_tokens,
            num_cached_tokens=self.scheduler.num_cached_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            num_evictions=self.pool.num_evictions,
            **self._counts,
        )

    def reset(self, params: Any | None = None) -> None:
        """Takes new weights: scales calibrate anew and every page is invalid.

        Continuations that run lose their pages and are recomputed with the new
        weights; what they have said stays.
        """
        self._settle()
        for sequence in reversed(list(self.scheduler.running)):
            self.scheduler.preempt(sequence)
        self.pool.forget_all()
        self.runner.reset(params)


_COUNTERS = (
    "num_steps",
    "num_output_tokens",
    "num_computed_tokens",
    "num_page_copies",
    "num_finished",
    "num_aborted",
)


def _logprobs(
    chosen: Chosen, row: int, num_top: int | None
) -> tuple[TokenLogprobs, ...] | None:
    if num_top is None:
        return None
    assert chosen.logprobs is not None
    assert chosen.top_ids is not None
    assert chosen.top_logprobs is not None
    ids = chosen.top_ids[row, :num_top].tolist()
    top = zip(ids, chosen.top_logprobs[row, :num_top].tolist(), strict=True)
    logprob = float(chosen.logprobs[row])
    token_id = int(chosen.token_ids[row])
    return (TokenLogprobs(token_id=token_id, logprob=logprob, top=tuple(top)),)
