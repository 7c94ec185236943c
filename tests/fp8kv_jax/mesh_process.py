"""One of two processes that hold a mesh together: `mesh_process.py ADDRESS ID`."""

import sys

import jax
import mesh_loop
import numpy as np
from jax.sharding import Mesh

import fp8kv_jax as fp8kv


def check_own_part(got, want):
    """Compares, byte by byte, what lies on this process's devices."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        y = np.atleast_1d(np.asarray(y))
        for shard in x.addressable_shards:
            part = np.atleast_1d(np.asarray(shard.data)).view(np.uint8)
            own = np.ascontiguousarray(y[shard.index or ...]).view(np.uint8)
            np.testing.assert_array_equal(part, own)


def main(address: str, process_id: int) -> None:
    jax.distributed.initialize(address, num_processes=2, process_id=process_id)
    assert len(jax.devices()) == 4
    assert len(jax.local_devices()) == 2
    # Heads are shared by devices of both processes: each row of the mesh has one of
    # either.
    devices = np.array(jax.devices()).reshape(2, 2).T
    mesh = Mesh(devices, ("data", "tensor"))
    placement = fp8kv.place(mesh, num_kv_heads=2, data="data")
    mesh_loop.NUM_LAYERS = 1  # compiles in half the time
    want = mesh_loop.run(2)
    got = mesh_loop.run(2, placement=placement)
    assert got["compilations"] == 1
    check_own_part(got["cache"], want["cache"])
    check_own_part(got["state"], want["state"])
    print("scales", np.asarray(got["state"].k_scale).ravel().tolist())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
