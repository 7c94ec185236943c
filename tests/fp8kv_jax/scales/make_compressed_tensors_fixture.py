"""Makes scale files with the compressed-tensors package, and lets it read ours back.

Needs packages that the tests do not, in an environment of its own:

    pip install torch==2.13.0 transformers==4.57.1 compressed-tensors==0.20.1

    python make_compressed_tensors_fixture.py make data/compressed_tensors_tensor
    python make_compressed_tensors_fixture.py make data/compressed_tensors_head
    python make_compressed_tensors_fixture.py read FOLDER EXPECTED.safetensors

`make` runs random tokens through a tiny random Llama whose cache the package
quantizes, and saves what the package holds. expected.json is from hooks of our own:
the largest K and V of each head, never touched by the package. `read` gives
FOLDER's recipe and tensors to the package and compares the scales it then holds with
EXPECTED.safetensors, which names them `layers.N.k_scale`.
"""

import argparse
import json
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.modeling import register_key_hook, register_value_hook
from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

STRATEGIES = {"tensor": "tensor", "head": "attn_head"}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        tie_word_embeddings=True,
        initializer_range=1.0,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def attentions(model):
    return [layer.self_attn for layer in model.model.layers]


def make(folder: Path) -> None:
    strategy = STRATEGIES[folder.name.rpartition("_")[2]]
    scheme = {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "dynamic": False,
        "symmetric": True,
    }
    model = tiny_llama()
    quantization = QuantizationConfig(
        config_groups={}, kv_cache_scheme=scheme, quantization_status="initialized"
    )
    apply_quantization_config(model, quantization)
    amax = observe(model)
    for attention, seen in zip(attentions(model), amax, strict=True):
        for letter in "kv":
            heads = torch.tensor(seen[letter], dtype=torch.bfloat16)
            scale = getattr(attention, f"{letter}_scale")
            largest = heads.reshape(scale.shape) if scale.numel() > 1 else heads.max()
            args = attention.quantization_scheme.input_activations
            values, _ = calculate_qparams(-largest, largest, args)
            scale.data.copy_(values.reshape(scale.shape))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "expected.json").write_text(json.dumps({"amax": amax}, indent=1) + "\n")


def observe(model) -> list[dict[str, list[float]]]:
    """Runs the model unquantized; the largest abs(K) and abs(V) of each head."""
    seen = []
    for attention in attentions(model):
        attention.quantization_enabled = False
        found: dict[str, list[float]] = {}
        seen.append(found)
        for letter, register in (("k", register_key_hook), ("v", register_value_hook)):

            def hook(_, values, found=found, letter=letter):
                found[letter] = values.abs().amax(dim=(0, 2, 3)).tolist()

            register(attention, hook)
    with torch.no_grad():
        model(torch.randint(16, (4, 32)))
    return seen


def read(folder: Path, expected: Path) -> None:
    recipe = json.loads((folder / "quantization_config.json").read_text())
    quantization = QuantizationConfig.model_validate(recipe["quantization_config"])
    model = tiny_llama().float()  # so that its scales hold float32 too
    apply_quantization_config(model, quantization)
    loaded = model.load_state_dict(load_file(folder / "kv_scales.safetensors"), False)
    assert not loaded.unexpected_keys, loaded.unexpected_keys
    assert not [name for name in loaded.missing_keys if "scale" in name]
    wanted = load_file(expected)
    for layer, attention in enumerate(attentions(model)):
        for name in ("k_scale", "v_scale"):
            got = getattr(attention, name).float().reshape(-1)
            assert torch.equal(got, wanted[f"layers.{layer}.{name}"]), (layer, name)
    with torch.no_grad():
        logits = model(torch.randint(16, (1, 8))).logits
    assert torch.isfinite(logits).all()
    print(f"{folder}: {len(wanted)} scales read back, all equal")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["make", "read"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("expected", type=Path, nargs="?")
    arguments = parser.parse_args()
    if arguments.command == "make":
        make(arguments.folder)
    else:
        read(arguments.folder, arguments.expected)


if __name__ == "__main__":
    main()
