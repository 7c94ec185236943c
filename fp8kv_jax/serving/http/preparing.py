"""What an engine does before a server accepts requests: compiles, and calibrates."""

from collections.abc import Callable, Sequence

import jax

from fp8kv_jax.serving.engine import Engine
from fp8kv_jax.serving.request import Request, SamplingParams


def calibrate_on(engine: Engine, prompts: Sequence[Sequence[int]]) -> int:
    """Runs prompts through an engine until its scales freeze.

    Args:
      engine: without other requests.
      prompts: token ids; a longer one than the engine holds is cut.

    Returns:
      How many prompts were begun.
    """
    config = engine.config
    longest = min(config.max_seq_len, engine.cache_config.num_slots + 1) - 1
    num_begun = 0
    waiting = iter(prompts)
    while not engine.stats().frozen:
        while engine.stats().num_waiting < 2:
            prompt = next(waiting, None)
            if prompt is None:
                break
            params = SamplingParams(max_tokens=1)
            engine.add(Request(prompt=prompt[:longest], params=params))
            num_begun += 1
        if not engine.has_work:
            break
        engine.step()
    while engine.has_work:
        engine.step()
    return num_begun


def preparation(prompts: Sequence[Sequence[int]]) -> Callable[[Engine], None]:
    """Compiles, and calibrates on prompts, before a server accepts requests."""

    def prepare(engine: Engine) -> None:
        # A GPU times kernels while it compiles, which requests would feel. On a CPU
        # compiling takes minutes, of which requests can do without half.
        engine.warm_up(background=jax.default_backend() == "cpu")
        if prompts:
            calibrate_on(engine, prompts)

    return prepare
