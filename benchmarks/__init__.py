"""Programs that measure the library: `python -m benchmarks --help`."""
