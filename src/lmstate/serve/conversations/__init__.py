"""Conversations of the page at `/`: trees of messages, kept by the server, with the exact tokens of every branch."""
