"""The wire format: errors, fields, streams, ids, metrics, and records with their owners."""
