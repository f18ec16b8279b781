"""What a rendered kernel module is written against: kernels, their launches, choices, scratch memory.

See docs/cuda.md. Artifacts import this module by its name, so its names are part of the format.
"""
