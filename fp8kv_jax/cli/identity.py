"""What a loaded model is, for scales that were made for it."""

from typing import TYPE_CHECKING

from fp8kv_jax.scales.identity import ModelIdentity, identify_model

if TYPE_CHECKING:
    from models.loading import LoadedModel


def identify(model: "LoadedModel") -> ModelIdentity:
    """Hashes a loaded model's parts; the same in whatever type it computes."""
    from models.fusion import split_projections

    return identify_model(
        model.config,
        split_projections(model.config, model.params),
        tokenizer=model.tokenizer.canonical_json(),
        chat_template=model.tokenizer.chat_template,
    )
