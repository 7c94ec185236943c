"""A digest of exported tensors, which safetensors files have none of themselves."""

import hashlib
from collections.abc import Mapping

import numpy as np

# In the metadata of the files that `exports` writes.
DIGEST_KEY = "fp8kv_sha256"


def digest_tensors(tensors: Mapping[str, np.ndarray]) -> str:
    """Hashes names, types, shapes and bytes, in the order of the names."""
    hashed = hashlib.sha256()
    for name, values in sorted(tensors.items()):
        hashed.update(f"{name} {values.dtype.name} {values.shape}\n".encode())
        hashed.update(values.tobytes())
    return hashed.hexdigest()
