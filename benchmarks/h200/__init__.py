"""What is measured on an NVIDIA H200: two shapes, one list of requests, one script."""
