"""Ollama's API, for clients that speak no other."""
