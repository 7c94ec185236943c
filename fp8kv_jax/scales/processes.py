"""Several processes that calibrate together: who they are, and what they agree on."""

import jax
import numpy as np
from jax.experimental import multihost_utils

# What the first process says instead of a number when it gives up.
_REFUSED = -1


def join(coordinator: str | None, num_processes: int, process_id: int | None) -> None:
    """Joins the other processes; call before anything touches a device.

    Args:
      coordinator: host:port where process 0 listens; None for a process on its own.
      num_processes: how many there are.
      process_id: which one this is, from 0.

    Raises:
      ValueError: if the three don't go together.
    """
    if coordinator is None and process_id is None and num_processes == 1:
        return
    if coordinator is None or process_id is None or num_processes < 2:
        raise ValueError(
            "Expected a coordinator, at least 2 processes and a process id together, "
            f"got {coordinator}, {num_processes} and {process_id}."
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            f"Expected a coordinator such as 10.0.0.1:8476, got {coordinator!r}."
        )
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"Expected a process id from 0 to {num_processes - 1}, got {process_id}."
        )
    jax.distributed.initialize(coordinator, num_processes, process_id)


def check_same(fingerprint: bytes) -> None:
    """Checks that every process runs the same: model, data, options.

    Raises:
      ValueError: in every process, if not.
    """
    if jax.process_count() == 1:
        return
    mine = np.frombuffer(fingerprint, np.uint8)
    everyone = np.asarray(multihost_utils.process_allgather(mine))
    different = np.flatnonzero((everyone != everyone[0]).any(axis=1))
    if different.size:
        raise ValueError(
            "Expected all processes to calibrate one model with the same data and "
            f"options, but process {different[0]} differs from process 0."
        )


def tell_start(first_batch: int | None) -> int:
    """Tells all processes what process 0 says: where to start.

    Args:
      first_batch: process 0's answer, None if it gives up; ignored elsewhere.

    Raises:
      ValueError: if process 0 gives up.
    """
    number = _REFUSED if first_batch is None else first_batch
    if jax.process_count() > 1:
        told = multihost_utils.broadcast_one_to_all(np.int32(number))
        number = int(told)
    if number == _REFUSED:
        raise ValueError("Expected process 0 to go on, but it gave up.")
    return number
