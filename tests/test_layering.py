"""Imports go one way: cli -> models -> fp8kv_jax -> pallas_kernels -> jax."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# What each part may import of our own.
ALLOWED = {
    "pallas_kernels": {"pallas_kernels"},
    "fp8kv_jax": {"fp8kv_jax", "pallas_kernels"},
    "models": {"models", "fp8kv_jax", "pallas_kernels"},
    "fp8kv_jax/cli": {"models", "fp8kv_jax", "pallas_kernels"},
}
OURS = {"pallas_kernels", "fp8kv_jax", "models", "tests", "benchmarks"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield node.module


def part_of(path):
    name = path.relative_to(ROOT).as_posix()
    return "fp8kv_jax/cli" if name.startswith("fp8kv_jax/cli/") else name.split("/")[0]


def sources():
    for package in ("pallas_kernels", "fp8kv_jax", "models"):
        yield from sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize(
    "path", list(sources()), ids=lambda p: str(p.relative_to(ROOT))
)
def test_no_module_imports_upward(path):
    ours = {name.split(".")[0] for name in imports(path)} & OURS
    assert ours <= ALLOWED[part_of(path)]


def test_only_the_composition_root_is_imported_by_nobody():
    for path in sources():
        if part_of(path) != "fp8kv_jax/cli":
            assert not [n for n in imports(path) if n.startswith("fp8kv_jax.cli")]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "pallas_kernels").glob("*/*.py")), ids=lambda p: str(p.name)
)
def test_an_implementation_never_imports_an_op(path):
    if path.name not in ("op.py", "__init__.py", "cases.py"):
        assert not [n for n in imports(path) if n.endswith(".op")]
