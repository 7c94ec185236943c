"""Makes the tiny Hugging Face models in `data/` and their expected logits.

Not run by the tests. It needs torch and transformers, which this project does not:

    python -m venv /tmp/reference
    /tmp/reference/bin/pip install torch==2.13.0 transformers==5.24.0
    /tmp/reference/bin/python tests/models/make_reference.py

Weights are random and stored in bfloat16; logits are what transformers computes from
them in float32 with its plain ("eager") attention.
"""

from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

DATA = Path(__file__).parent / "data"
NUM_TOKENS = 24
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Every size that families choose apart from the others is set so that mixing two up
# shows: head_dim is not hidden / heads, windows are shorter than the text, and so on.
CONFIGS = {
    "tiny_llama": transformers.LlamaConfig(
        **SIZES,
        num_hidden_layers=2,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "tiny_qwen2": transformers.Qwen2Config(
        **SIZES, num_hidden_layers=2, tie_word_embeddings=True
    ),
    "tiny_qwen3": transformers.Qwen3Config(
        **SIZES, num_hidden_layers=2, tie_word_embeddings=False, head_dim=16
    ),
    "tiny_gemma2": transformers.Gemma2Config(
        **SIZES,
        num_hidden_layers=2,
        head_dim=16,
        query_pre_attn_scalar=12,
        sliding_window=5,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=4.0,
    ),
    "tiny_gemma3": transformers.Gemma3TextConfig(
        **SIZES,
        num_hidden_layers=3,
        head_dim=16,
        query_pre_attn_scalar=12,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {
                "rope_type": "linear",
                "rope_theta": 1e6,
                "factor": 8.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main() -> None:
    for name, config in CONFIGS.items():
        torch.manual_seed(len(name))
        folder = DATA / name
        model = transformers.AutoModelForCausalLM.from_config(config)
        randomize(model)
        model.to(torch.bfloat16).save_pretrained(folder)
        save_tokenizer(folder)
        save_logits(folder, config.vocab_size)


def randomize(model: torch.nn.Module) -> None:
    """Draws all weights wide enough that every part of the model shapes the logits."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # biases and norm scales
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "embed" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.5)
            else:
                fan_in = parameter.shape[1]
                parameter.copy_(torch.randn_like(parameter) * 1.5 * fan_in**-0.5)


def save_tokenizer(folder: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:110]
    pieces = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("i", "n"), ("an", "d")]
    pieces += [*letters, *(left + right for left, right in merges)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(pieces[:6])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def save_logits(folder: Path, vocab_size: int) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = np.random.default_rng(0).integers(vocab_size, size=(2, NUM_TOKENS))
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)).logits
    np.savez_compressed(
        folder / "expected.npz",
        token_ids=ids.astype(np.int32),
        logits=logits.numpy().astype(np.float32),
    )


if __name__ == "__main__":
    main()
