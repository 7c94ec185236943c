"""Scales as deployment artifacts: written, checked, exchanged, kept in a registry."""

from fp8kv_jax.scales.artifact import check_against_model as check_against_model
from fp8kv_jax.scales.artifact import from_state as from_state
from fp8kv_jax.scales.artifact import read_artifact as read_artifact
from fp8kv_jax.scales.artifact import write_artifact as write_artifact
from fp8kv_jax.scales.exports import export_scales as export_scales
from fp8kv_jax.scales.identity import identify_model as identify_model
from fp8kv_jax.scales.imports import import_scales as import_scales
from fp8kv_jax.scales.manifest import Manifest as Manifest
from fp8kv_jax.scales.registry import Registry as Registry
from fp8kv_jax.scales.scale_set import ScaleError as ScaleError
from fp8kv_jax.scales.scale_set import ScaleSet as ScaleSet
