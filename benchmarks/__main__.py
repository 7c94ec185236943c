"""`python -m benchmarks [name ...]`: checks each op, then times it, and prints a table."""

import argparse
import importlib
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.timing import copy_ceiling_gb_per_s

NAMES = ("paged_attention", "kv_append", "kv_requantize", "absmax", "pages")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(NAMES))
    names = parser.parse_args().names or NAMES
    if unknown := set(names) - set(NAMES):
        parser.error(f"Expected names of {NAMES}, got {sorted(unknown)}.")
    on_gpu = jax.default_backend() == "gpu"
    ceiling = copy_ceiling_gb_per_s() if on_gpu else None
    console = Console()
    console.print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    if ceiling:
        console.print(f"copy ceiling {ceiling:.0f} GB/s")
    for name in names:
        module = importlib.import_module(f"benchmarks.bench_{name}")
        console.print(_table(name, module.run(small=not on_gpu), ceiling))


def _table(name: str, rows: list[dict[str, Any]], ceiling: float | None) -> Table:
    table = Table("op", "case", "implementation", "us", "GB/s", "% of copy", title=name)
    for row in rows:
        rate = row.get("gb_per_s")
        table.add_row(
            row["op"],
            row["case"],
            row["implementation"],
            f"{row['device_us']:.1f}",
            f"{rate:.1f}" if rate else "",
            f"{100 * rate / ceiling:.0f}" if rate and ceiling else "",
        )
    return table


if __name__ == "__main__":
    main()
