"""A replay of the demo model: sound scales cost little, clipping ones show."""

import numpy as np
import pytest

from fp8kv_jax.cache import CacheConfig
from fp8kv_jax.drift.replay import Replay, ReplayConfig, ReplaySequence
from fp8kv_jax.drift.workload import Tally
from fp8kv_jax.drift.workload_slices import make_slices
from fp8kv_jax.scales.scale_set import ScaleSet
from models.loading import default_model_path, load_model

TEXT = (
    "The river rises in the mountains and flows south through the valley, where it "
    "is joined by two smaller streams before it reaches the sea."
)


@pytest.fixture(scope="module")
def model():
    path = default_model_path()
    assert path is not None, "the dev group holds the demo model"
    return load_model(path, "float32")


def replay(model, k_scale):
    config = model.config
    ids = model.tokenizer.encode(TEXT)
    lengths = np.zeros(65, np.int64)
    lengths[len(ids)] = 1
    tally = Tally(lengths=lengths, classes={"prose": [1, 1]}, languages={"en": [1, 1]})
    scales = ScaleSet.from_scales(
        {i: (np.array([k_scale]), np.array([0.1])) for i in range(config.num_layers)},
        granularity="tensor",
    )
    cache = CacheConfig(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_pages=1,
        page_size=64,
    )
    run = Replay(
        model.forward,
        model.params,
        scales,
        ReplayConfig(
            cache=cache, wide_dtype="float32", max_tokens=64, tokens_per_step=64
        ),
        make_slices(tally, max_new_tokens=0),
        decode=model.tokenizer.decode,
    )
    sequence = ReplaySequence(
        name="river",
        token_ids=ids,
        prompt_length=len(ids),
        data_class="prose",
        language="en",
    )
    list(run.run([sequence]))
    return run.range_report(), run.quality_report()


# Half a minute of compilation; CI has the same on random models, in test_replay.
@pytest.mark.slow
def test_scales_that_cover_cost_little_and_scales_that_clip_show(model):
    ranges, quality = replay(model, k_scale=0.1)
    assert not ranges.flags
    assert 1e-4 < quality.overall.kl_mean < 0.05
    assert quality.overall.perplexity_full < 40
    assert quality.overall.top1_agreement > 0.8
    clipped, worse = replay(model, k_scale=0.1 / 16)
    assert {x.kind for x in clipped.flags} == {"clipped"}
    assert {x.tensor for x in clipped.flags} == {"k"}
    assert clipped.fp8_run_saturated > 0
    assert worse.overall.kl_mean > 5 * quality.overall.kl_mean
    assert worse.worst_tokens[0].kl == worse.overall.kl_max
