"""The wire format: errors, fields, streams, ids, metrics and database files."""
