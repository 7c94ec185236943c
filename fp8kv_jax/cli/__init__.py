"""The `fp8kv` command: the one part of the package that may import `models`."""
