"""Rewrites of the graph, one file a pass."""
