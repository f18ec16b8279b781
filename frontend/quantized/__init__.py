"""Quantised checkpoints as they are found, one file a format."""
