"""How much a compiled model differs from the one it was made of, on a text."""
