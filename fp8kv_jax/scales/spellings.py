"""Names that checkpoints give to the scales of their KV cache, as one table."""

import enum
import re
from dataclasses import dataclass


class Role(enum.Enum):
    """What a tensor beside the attention of a layer is."""

    K = "k"
    V = "v"
    BOTH = "kv"  # one scale, meant for K and for V
    OFFSET = "offset"  # a zero point: harmless only if it is zero
    QUERY = "query"  # scales Q or the probabilities, which no cache holds


@dataclass(frozen=True)
class Spelling:
    """One way of naming.

    Attributes:
      origin: who writes it, for messages.
      tail: what follows the attention block of layer N. `{k|v}` stands for one letter,
        the same in each place.
      role: None where the letter says it.
    """

    origin: str
    tail: str
    role: Role | None = None


SPELLINGS = (
    Spelling("compressed-tensors", "{k|v}_scale"),
    Spelling("vLLM", "attn.{k|v}_scale"),
    Spelling("ModelOpt", "{k|v}_proj.{k|v}_scale"),
    Spelling("Quark, compressed-tensors before 0.6", "{k|v}_proj.output_scale"),
    Spelling("fused projections", "qkv_proj.{k|v}_scale"),
    # Renaming k_proj to qkv_proj inside a name that is fused already.
    Spelling("fused projections, renamed twice", "qkqkv_proj.{k|v}_scale"),
    Spelling("cache modules", "{k|v}_cache.scale"),
    Spelling("AutoFP8", "kv_scale", Role.BOTH),
    Spelling("AutoFP8 in vLLM", "attn.kv_scale", Role.BOTH),
    Spelling("TensorRT-LLM", "kv_cache_scaling_factor", Role.BOTH),
    Spelling("compressed-tensors", "{k|v}_zero_point", Role.OFFSET),
    Spelling("vLLM", "attn.{k|v}_zero_point", Role.OFFSET),
    Spelling("ModelOpt", "{k|v}_proj.{k|v}_zero_point", Role.OFFSET),
    # ModelOpt's affine caches; the projection's own bias is called `bias`.
    Spelling("ModelOpt", "{k|v}_proj.{k|v}_bias", Role.OFFSET),
    Spelling("Quark", "{k|v}_proj.output_zero_point", Role.OFFSET),
    Spelling("fused projections", "qkv_proj.{k|v}_zero_point", Role.OFFSET),
    Spelling("cache modules", "{k|v}_cache.zero_point", Role.OFFSET),
    Spelling("compressed-tensors", "q_scale", Role.QUERY),
    Spelling("vLLM", "attn.q_scale", Role.QUERY),
    Spelling("vLLM", "attn.prob_scale", Role.QUERY),
    Spelling("ModelOpt", "q_proj.q_scale", Role.QUERY),
    Spelling("Quark", "q_proj.output_scale", Role.QUERY),
    Spelling("Quark", "prob_output_scale", Role.QUERY),
)

# Where a decoder's layers may stand. A vision or an audio tower has layers of the same
# names: its prefix must not match, or its scales would become the decoder's.
PREFIX = r"(?:(?:model|language_model|transformer|backbone)\.)*"
# Without leading zeros, and short enough to be a number.
INDEX = r"(?:0|[1-9][0-9]{0,8})"
LAYER = rf"layers\.(?P<layer>{INDEX})"
BLOCK = r"(?:self_attn|attention|attn|mixer)"


@dataclass(frozen=True, kw_only=True)
class Match:
    """A name, understood."""

    layer: int
    role: Role
    spelling: Spelling


def match_name(name: str) -> Match | None:
    """Finds the layer and the role that a tensor's name says; None if none fits."""
    place = _PLACE.fullmatch(name)
    if place is None or place["tail"] not in _BY_TAIL:
        return None
    spelling, role = _BY_TAIL[place["tail"]]
    return Match(layer=int(place["layer"]), role=role, spelling=spelling)


def looks_like_kv_scale(name: str) -> bool:
    """Says whether a name that no spelling fits still seems to be one of these.

    Scales of weights and of inputs don't, and norms don't.
    """
    return _LOOKALIKE.search(name) is not None


def examples() -> str:
    """Names the scale spellings with their origins, for messages."""
    shown = [f"{s.tail} ({s.origin})" for s in SPELLINGS if s.role in (None, Role.BOTH)]
    return "model.layers.N.self_attn. followed by " + ", ".join(shown)


def _by_tail() -> dict[str, tuple[Spelling, Role]]:
    table = {}
    for spelling in SPELLINGS:
        for letter in "kv" if "{k|v}" in spelling.tail else "k":
            tail = spelling.tail.replace("{k|v}", letter)
            table[tail] = (spelling, spelling.role or Role(letter))
    return table


_BY_TAIL = _by_tail()
_PLACE = re.compile(rf"{PREFIX}{LAYER}\.{BLOCK}\.(?P<tail>.+)")

_LOOKALIKE = re.compile(
    r"""(?:^|[._])
    (?: (?:k|v|kv|key|value) (?:_cache)? _ (?:(?:output|global|quant|dequant)_)?
      | (?:k|v|kv|key|value)_cache [._] (?:output_)?
      | (?:k|v|kv|qkv|qkqkv|key|value)_proj\.output_
    )
    (?:scale|scales|scaling_factor) (?:_inv)? $""",
    re.VERBOSE | re.IGNORECASE,
)
