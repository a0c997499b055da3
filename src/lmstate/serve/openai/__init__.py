"""OpenAI's protocols: chat, completions, embeddings, models and tokens."""
