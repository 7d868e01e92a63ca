"""The entry points of this folder import the files that Bazel declared, not those of an editable install."""

import sys


def import_them() -> None:
    """Takes away the finders by which an editable install in the environment would stand before Bazel's runfiles."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable_")]
