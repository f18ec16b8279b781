"""From a Hugging Face checkpoint to a graph: reading, tracing, importing."""
