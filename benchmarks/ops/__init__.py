"""The operations: dispatch, combine, exchanges."""
