"""Bytes, checks, tables and arguments that the other folders share."""
