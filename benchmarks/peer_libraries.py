"""How other libraries are called on one problem of ours: decode over FP8 pages."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.cases import Case, make_inputs
from pallas_kernels.pages.layout import as_bits

# One scale for K and for V, because XQA takes only one; a power of two keeps the
# dequantized values exact in BF16.
SCALE = 0.25
WORKSPACE_BYTES = 256 << 20

# Gives the output, [num_seqs, num_q_heads, head_dim], in the library's own type.
type Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """One call: queries, pools in our layout, and which pages belong to whom."""

    case: Case
    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    block_table: jax.Array
    seq_lens: jax.Array

    @classmethod
    def of(cls, case: Case) -> "Problem":
        return cls(case, *make_inputs(case, 0)[0])

    @property
    def num_values(self) -> tuple[int, ...]:
        """Factors of how many elements of K and V are read."""
        case = self.case
        return sum(case.seq_lens), case.num_kv_heads, case.head_dim, 2


@dataclass(frozen=True, slots=True)
class Peer:
    """A library's way to compute it.

    Attributes:
      name: what a row is labelled with.
      library: what has to be installed.
      itemsize: bytes of a cached element.
      prepare: brings a problem into the library's form and gives the call.
    """

    name: str
    library: str
    itemsize: int
    prepare: Callable[[Problem], Call]

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.library) is not None


def _to_torch(x: jax.Array) -> Any:
    """Hands an array over without a copy; FP8 as bytes, which both sides exchange."""
    import torch

    is_fp8 = x.dtype == jnp.float8_e4m3fn
    x = jax.block_until_ready(as_bits(x) if is_fp8 else x)
    tensor = torch.from_dlpack(x)
    return tensor.view(torch.float8_e4m3fn) if is_fp8 else tensor


def torch_sdpa(backend: str | None) -> Callable[[Problem], Call]:
    """Makes the call of PyTorch's attention over contiguous BF16 keys and values."""

    def prepare(problem: Problem) -> Call:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q = _to_torch(jnp.swapaxes(problem.q, 1, 2))
        k, v = (_to_torch(x) for x in _dense(problem))
        attend = torch.nn.functional.scaled_dot_product_attention

        def call() -> Any:
            if backend is None:
                return attend(q, k, v, enable_gqa=True)[:, :, 0]
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return attend(q, k, v, enable_gqa=True)[:, :, 0]

        return call

    return prepare


def _dense(problem: Problem) -> tuple[jax.Array, jax.Array]:
    """Gathers dequantized keys and values, `[seqs, heads, tokens, dim]`, one length."""

    def gather(pages: jax.Array) -> jax.Array:
        rows = jnp.swapaxes(pages[problem.block_table], 1, 2)
        rows = rows.reshape(*rows.shape[:2], -1, rows.shape[-1]).astype(jnp.bfloat16)
        return (rows * jnp.bfloat16(SCALE))[:, :, : problem.case.seq_lens[0]]

    return gather(problem.k_pages), gather(_natural(problem.v_pages))


def flashinfer_fa2(problem: Problem) -> Call:
    """Makes the call of FlashInfer's decode wrapper: BF16 queries, tensor cores."""
    import flashinfer
    import torch

    case = problem.case
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "HND", use_tensor_cores=True, backend="fa2"
    )
    table = np.asarray(problem.block_table)
    counts = [-(-length // case.page_size) for length in case.seq_lens]
    pages = [row[:count] for row, count in zip(table, counts, strict=True)]
    last = [(length - 1) % case.page_size + 1 for length in case.seq_lens]

    def ints(values: Any) -> Any:
        return torch.as_tensor(np.asarray(values, np.int32), device="cuda")

    wrapper.plan(
        ints([0, *np.cumsum(counts)]),
        ints(np.concatenate(pages)),
        ints(last),
        case.num_q_heads,
        case.num_kv_heads,
        case.head_dim,
        case.page_size,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.float8_e4m3fn,
    )
    q = _to_torch(problem.q[:, 0])
    pools = _to_torch(problem.k_pages), _to_torch(_natural(problem.v_pages))
    return lambda: wrapper.run(q, pools, k_scale=SCALE, v_scale=SCALE)


def flashinfer_xqa(problem: Problem) -> Call:
    """Makes the call of the TensorRT-LLM kernel that FlashInfer carries."""
    import torch
    from flashinfer.xqa import xqa

    case = problem.case
    q = _to_torch(problem.q)  # its axis of one query is the kernel's axis of beams
    k_pages, v_pages = _to_torch(problem.k_pages), _to_torch(_natural(problem.v_pages))
    table = _to_torch(problem.block_table)
    lens = np.asarray(problem.seq_lens, np.uint32)[:, None]
    seq_lens = torch.as_tensor(lens, device="cuda")
    output = torch.zeros_like(q)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    semaphores = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda")

    def call() -> Any:
        xqa(
            q,
            k_pages,
            v_pages,
            table,
            seq_lens,
            output,
            workspace,
            semaphores.view(torch.uint32),
            case.num_kv_heads,
            case.page_size,
            kv_scale=SCALE,
            kv_layout="HND",
        )
        return output[:, 0]

    return call


def _natural(v_pages: jax.Array) -> jax.Array:
    """Turns V pages into the layout of K pages."""
    return jnp.swapaxes(v_pages, 2, 3)


PEERS = (
    Peer("torch sdpa", "torch", 2, torch_sdpa(None)),
    Peer("torch cudnn", "torch", 2, torch_sdpa("CUDNN_ATTENTION")),
    Peer("torch flash", "torch", 2, torch_sdpa("FLASH_ATTENTION")),
    Peer("flashinfer fa2", "flashinfer", 1, flashinfer_fa2),
    Peer("flashinfer xqa", "flashinfer", 1, flashinfer_xqa),
)
