"""Entry point of every pytest_test: python pytest_main.py [pytest arguments] files."""

import os
import sys

import declared_files
import pytest


def arguments() -> list[str]:
    """Bazel's test protocol, in pytest's words."""
    given = ["-q", "-p", "no:cacheprovider", "-m", "not slow"]  # the rest of make's targets runs
    if "XML_OUTPUT_FILE" in os.environ:
        given.append("--junitxml=" + os.environ["XML_OUTPUT_FILE"])
    if "TESTBRIDGE_TEST_ONLY" in os.environ:  # bazel test --test_filter=EXPRESSION
        given += ["-k", os.environ["TESTBRIDGE_TEST_ONLY"]]
    if "TEST_TMPDIR" in os.environ:
        given.append("--basetemp=" + os.path.join(os.environ["TEST_TMPDIR"], "pytest"))
    return given


def main() -> int:
    declared_files.import_them()
    status = pytest.main([*arguments(), *sys.argv[1:]])
    # A file in which every test is marked slow, or is left out by --test_filter, has not failed.
    return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)


if __name__ == "__main__":
    sys.exit(main())
