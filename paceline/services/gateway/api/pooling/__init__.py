"""Vectors and labels of texts: embeddings, ranking and classification."""
