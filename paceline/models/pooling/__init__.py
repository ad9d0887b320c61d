"""Models that make vectors, scores and labels of texts: encoders, pooling, and heads."""
