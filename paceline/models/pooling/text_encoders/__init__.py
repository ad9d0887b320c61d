"""Encoders of text, one file for each kind of architecture."""
