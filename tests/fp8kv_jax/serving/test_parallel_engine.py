"""The engine and the command line on eight devices, simulated in another process."""

import re
from pathlib import Path

import jax
from devices import start
from jax.sharding import AbstractMesh

from fp8kv_jax.cache import CacheConfig
from fp8kv_jax.cli import serve
from fp8kv_jax.parallel import AXES, Placement


def test_eight_devices_serve_as_one_does():
    tests = Path(__file__).with_name("eight_device_engine.py")
    process = start("-m", "pytest", "-q", "-p", "no:cacheprovider", tests, devices=8)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert re.search(r"\d+ passed in", output), output


def test_the_pool_is_sized_by_what_each_device_has_to_hold(monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 3_000_000, "bytes_in_use": 2_000_000}

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    cache = CacheConfig(num_layers=1, num_kv_heads=2, head_dim=16, num_pages=1)

    def num_pages(*sizes):
        placement = Placement(AbstractMesh(sizes, AXES)) if sizes else None
        return serve._num_pages_that_fit(cache, 64, placement)

    # Of 1,000,000 bytes 70 %, by 128 tokens of 2 x 2 x 16 bytes: 85.4 pages.
    assert num_pages() == 85
    assert num_pages(1, 2, 1) == 170
    assert num_pages(1, 1, 2) == 85  # both hold the KV heads alike
