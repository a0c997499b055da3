"""Structured output: JSON schemas, regular expressions and grammars as masks over a vocabulary."""
