"""Many devices, simulated on the CPU in processes of their own."""

import pathlib
import re
import socket

import jax
import jax.numpy as jnp
import mesh_loop
import numpy as np
import pytest
from devices import start
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

import fp8kv_jax as fp8kv
from fp8kv_jax.parallel import AXES

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize(
    "which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)]
)
def test_eight_devices_do_what_one_does(which):
    command = "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=10"
    tests = HERE / "eight_devices.py"
    process = start(*command, "-m", which, tests, devices=8)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert re.search(r"\d+ passed", output), output


def test_two_processes_do_what_one_does():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    script = HERE / "mesh_process.py"
    pair = [start(script, address, i, devices=2) for i in (0, 1)]
    outputs = [process.communicate(timeout=120)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0], "\n".join(outputs)
    scales = [re.search("scales (.*)", output)[1] for output in outputs]
    assert scales[0] == scales[1]


@pytest.mark.parametrize("num_kv_heads", [8, 1])
def test_the_mosaic_kernels_lower_for_two_gpus(monkeypatch, num_kv_heads):
    monkeypatch.setattr(mesh_loop, "HEAD_DIM", 128)
    monkeypatch.setattr(mesh_loop, "PAGE_SIZE", 64)
    monkeypatch.setattr(mesh_loop, "NUM_LAYERS", 1)
    split = min(num_kv_heads, 2)
    h200 = AbstractDevice("NVIDIA H200", None, "gpu")
    types = (AxisType.Auto,) * 3
    sizes = (1, split, 2 // split)
    mesh = AbstractMesh(sizes, AXES, types, abstract_device=h200)
    placement = fp8kv.Placement(mesh)

    def shape(x, sharding):
        on_gpu = jnp.float8_e4m3fn if x.dtype == jnp.uint8 else x.dtype
        return jax.ShapeDtypeStruct(x.shape, on_gpu, sharding=sharding)

    batch, _ = mesh_loop.make_batch(0, 0)
    trees = *map(jax.eval_shape, mesh_loop.make_loop(num_kv_heads)), batch
    args = [jax.tree.map(shape, x, placement.shardings(x)) for x in trees]
    args += mesh_loop.make_rows(0, num_kv_heads)
    write = jax.jit(
        mesh_loop.make_write(placement, "mosaic_gpu"), donate_argnums=(0, 1)
    )
    text = write.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    # The layer appends, attends, copies pages and requantizes.
    assert text.count("mosaic_gpu") >= 4
    own_pool = (mesh_loop.NUM_PAGES, num_kv_heads // split, 64, 128)
    assert f"tensor<{'x'.join(map(str, own_pool))}xf8E4M3FN>" in text


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_kv_heads", "granularity"), [(8, "tensor"), (8, "head"), (1, "tensor")]
)
def test_two_gpus_leave_the_bytes_and_scales_of_one(
    monkeypatch, num_kv_heads, granularity
):
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setattr(mesh_loop, "HEAD_DIM", 128)
    monkeypatch.setattr(mesh_loop, "PAGE_SIZE", 64)
    placement = fp8kv.place(
        Mesh(np.array(jax.devices()[:2]), ("tensor",)), num_kv_heads
    )
    options = {"implementation": "mosaic_gpu", "telemetry": granularity == "head"}
    want = mesh_loop.run(num_kv_heads, granularity, **options)
    got = mesh_loop.run(num_kv_heads, granularity, placement, **options)
    assert got["compilations"] == 1
    for name in ("cache", "state"):
        pairs = jax.tree.leaves(got[name]), jax.tree.leaves(want[name])
        for x, y in zip(*pairs, strict=True):
            x, y = (np.atleast_1d(a).view(np.uint8) for a in (x, y))
            np.testing.assert_array_equal(x, y)
