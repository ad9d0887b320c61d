"""GGUF files: what their metadata and blocks mean, and their conversion to a Hugging Face folder."""
