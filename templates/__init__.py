"""Jinja templates of the kernels and of the program, one file a template."""
