"""The test suite: code that its files share is in `tests.support`."""
