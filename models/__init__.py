"""Decoder models for JAX, their loaders and tokenizers; importing it starts no device."""
