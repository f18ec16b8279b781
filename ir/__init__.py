"""The graph IR: types, ops, verifier, printer, parser and reference interpreter."""
