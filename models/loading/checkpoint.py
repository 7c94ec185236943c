"""Places the tensors of a file into a model's parameters, and checks all of them."""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import DTypeLike

from models.config import ModelConfig
from models.loading.errors import ModelFileError
from models.transformer import abstract_model


class Form(enum.Enum):
    """How a file holds a parameter."""

    TABLE = "table"  # as it is: [vocab, hidden]
    MATRIX = "matrix"  # [out, in]; the model multiplies by [in, out]
    VECTOR = "vector"


# Each parameter of a layer: path in the module, and its form.
_LAYER_FORMS = {
    "attention_norm.scale": Form.VECTOR,
    "attention.q.kernel": Form.MATRIX,
    "attention.k.kernel": Form.MATRIX,
    "attention.v.kernel": Form.MATRIX,
    "attention.q.bias": Form.VECTOR,
    "attention.k.bias": Form.VECTOR,
    "attention.v.bias": Form.VECTOR,
    "attention.out.kernel": Form.MATRIX,
    "attention.q_norm.scale": Form.VECTOR,
    "attention.k_norm.scale": Form.VECTOR,
    "attention_out_norm.scale": Form.VECTOR,
    "mlp_norm.scale": Form.VECTOR,
    "mlp.gate.kernel": Form.MATRIX,
    "mlp.up.kernel": Form.MATRIX,
    "mlp.down.kernel": Form.MATRIX,
    "mlp_out_norm.scale": Form.VECTOR,
}
_MODEL_FORMS = {
    "embedding": Form.TABLE,
    "final_norm.scale": Form.VECTOR,
    "head": Form.TABLE,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorFile:
    """The tensors of a model file or of several, read one at a time.

    Attributes:
      label: the file's name, for messages.
      shapes: shape of each tensor, in C order (a matrix is [out, in]).
      read: makes the named tensor's values.
      ignored: says whether a tensor nobody asks for is harmless.
    """

    label: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    ignored: Callable[[str], bool]


type Convert = Callable[[str, np.ndarray], np.ndarray]


def load_params(
    config: ModelConfig,
    file: TensorFile,
    *,
    layer_names: Mapping[str, str],
    model_names: Mapping[str, str],
    dtype: DTypeLike,
    convert: Convert = lambda path, values: values,
) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """Builds a model's graph definition and parameters from a file's tensors.

    Args:
      config: the model that the file should hold.
      file: where the tensors come from.
      layer_names: tensor name by parameter path within a layer, `{i}` for the layer.
      model_names: tensor name by parameter path, for what is there once.
      dtype: type of the parameters; norm scales stay float32.
      convert: last change to a parameter's values, in the file's orientation; gets
        the path without the layer.

    Raises:
      ModelFileError: if tensors are missing, left over, or of the wrong shape.
    """
    graphdef, abstract = abstract_model(config, dtype)
    leaves, treedef = jax.tree.flatten_with_path(abstract)
    wanted = [
        (_describe(path, layer_names, model_names), leaf) for path, leaf in leaves
    ]
    _check_names(file, [names.tensor for names, _ in wanted])
    _check_shapes(file, wanted)
    arrays = [_place(file, names, leaf, convert) for names, leaf in wanted]
    return graphdef, jax.tree.unflatten(treedef, arrays)


@dataclasses.dataclass(frozen=True)
class _Names:
    path: str  # within its layer
    tensor: str
    form: Form


def _describe(
    path: tuple[Any, ...],
    layer_names: Mapping[str, str],
    model_names: Mapping[str, str],
) -> _Names:
    keys = [entry.key for entry in path]
    if keys[0] == "layers":
        name = ".".join(keys[2:])
        tensor = layer_names[name].format(i=keys[1])
        return _Names(name, tensor, _LAYER_FORMS[name])
    name = ".".join(keys)
    return _Names(name, model_names[name], _MODEL_FORMS[name])


def _check_names(file: TensorFile, wanted: Iterable[str]) -> None:
    wanted = set(wanted)
    missing = sorted(wanted - set(file.shapes))
    if missing:
        raise ModelFileError(
            f"{file.label}: {len(missing)} tensors are missing: {shorten(missing)}."
        )
    extra = sorted(
        name for name in file.shapes if name not in wanted and not file.ignored(name)
    )
    if extra:
        raise ModelFileError(
            f"{file.label}: {len(extra)} tensors have no place in the model that its "
            f"metadata describes: {shorten(extra)}."
        )


def _check_shapes(
    file: TensorFile, wanted: list[tuple[_Names, jax.ShapeDtypeStruct]]
) -> None:
    wrong = []
    for names, leaf in wanted:
        shape = leaf.shape[::-1] if names.form is Form.MATRIX else leaf.shape
        if file.shapes[names.tensor] != shape:
            found = file.shapes[names.tensor]
            wrong.append(f"{names.tensor} is {found}, expected {shape}")
    if wrong:
        raise ModelFileError(
            f"{file.label}: {len(wrong)} tensors have another shape than its metadata "
            f"says: {shorten(wrong, separator='; ')}."
        )


def _place(
    file: TensorFile, names: _Names, leaf: jax.ShapeDtypeStruct, convert: Convert
) -> jax.Array:
    values = convert(names.path, file.read(names.tensor))
    if names.form is Form.MATRIX:
        values = values.T
    # An array of our own: a CPU device may keep it instead of copying it.
    owned = np.array(values, dtype=leaf.dtype, order="C", copy=True)
    return jax.device_put(owned)


def shorten(names: list[str], *, separator: str = ", ", limit: int = 6) -> str:
    """Joins the first few names, and counts the rest."""
    shown = separator.join(names[:limit])
    left = len(names) - limit
    return f"{shown} and {left} more" if left > 0 else shown
