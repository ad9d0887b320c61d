"""Scores of documents for queries, with the routes and shapes of vLLM, Jina, Cohere, Infinity and TEI."""
