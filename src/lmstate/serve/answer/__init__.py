"""From a request to its answer: messages, constraints, handlers and the service that all protocols share."""
