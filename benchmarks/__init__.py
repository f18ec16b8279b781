"""Speed against Hugging Face `generate`, in one run, on one machine."""
