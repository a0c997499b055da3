"""Sounds for models that hear: files within limits, and the features that transformers makes of them."""
