"""The test suite: what its files share is in `tests.support`."""
