"""Choosing codes by what the model computes: calibration, layer by layer over the graph."""
