"""vLLM's routes around tokens: tokenize, render, derender, generate, and scores of documents."""
