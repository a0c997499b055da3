"""OpenAI's Responses API: items, stored responses, conversations and background work."""
