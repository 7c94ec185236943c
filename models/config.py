"""What distinguishes one decoder from another, as one frozen description."""

import dataclasses
from typing import Literal

from models.rope import Rope

type Activation = Literal["silu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Describes a decoder of the Llama, Qwen2, Qwen3, Gemma-2 or Gemma-3 family.

    The decoder reads this and nothing else: `architecture` only names the family in
    messages and artifacts, and changes no arithmetic.

    Attributes:
      architecture: name of the family, as in KNOWN_ARCHITECTURES.
      max_context: the longest sequence, in tokens, that the model was made for.
      ropes: the rotary embedding of each layer.
      sliding_windows: for each layer, how many of the newest tokens a query sees,
        itself included; None for all.
      softmax_scale: factor on q . k before the soft cap and the softmax.
      attention_soft_cap: c of `c * tanh(score / c)`, or None.
      logit_soft_cap: the same for the final logits.
      tied_head: the head is the embedding table.
      qkv_bias: the q, k and v projections add a bias.
      qk_norm: q and k heads pass an RMS norm before the rotary embedding.
      sandwich_norms: attention and MLP outputs are normed before they are added.
      embedding_scale: factor on the embedding, rounded to the compute type.
      bos_id: token that starts a text, None if the model has none.
      eos_ids: tokens that end a text.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context: int
    ropes: tuple[Rope, ...]
    sliding_windows: tuple[int | None, ...]
    softmax_scale: float
    rms_norm_eps: float
    activation: Activation = "silu"
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    tied_head: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    embedding_scale: float = 1.0
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in _COUNTS:
            if getattr(self, field) < 1:
                raise ValueError(
                    f"Expected {field} to be at least 1, got {getattr(self, field)}."
                )
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"Expected num_q_heads={self.num_q_heads} to be a multiple of "
                f"num_kv_heads={self.num_kv_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"Expected an even head_dim, got {self.head_dim}: the rotary "
                "embedding turns pairs."
            )
        for field in ("ropes", "sliding_windows"):
            if len(getattr(self, field)) != self.num_layers:
                raise ValueError(
                    f"Expected {field} to have {self.num_layers} entries, one per "
                    f"layer, got {len(getattr(self, field))}."
                )
        for window in self.sliding_windows:
            if window is not None and window < 1:
                raise ValueError(
                    f"Expected each sliding window to be at least 1, got {window}."
                )


_COUNTS = (
    "num_layers",
    "hidden_size",
    "num_q_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_context",
)

KNOWN_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
