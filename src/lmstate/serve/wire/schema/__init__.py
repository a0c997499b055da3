"""The bodies of requests, one file per protocol. Each field that a handler reads is here with its type and range:
`/openapi.json` and the texts of errors are made of it."""
