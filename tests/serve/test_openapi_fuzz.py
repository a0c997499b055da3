"""What the OpenAPI document allows, and what it does not, drawn by schemathesis: each gets an answer of 2xx or 4xx."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from lmstate.serve.app import PATHS
from lmstate.serve.conversations import routes as conversations
from lmstate.serve.openapi import document
from tests.serve.running import Running
from tests.serve.test_bad_input import check

schemathesis = pytest.importorskip("schemathesis")
schema = schemathesis.openapi.from_dict(document((*PATHS, *conversations.PATHS)))
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of")
NO_JSON = ("/snapshot", "/metrics", "/events")


def existing(path: str, server: Running) -> dict[str, str]:
    """Names of what is there, for the parameters of a path."""
    with server.client() as client:

        def made(path: str, body: Any) -> Any:
            return client.post(path, json=body).json()

        if "/sessions/" in path:
            made("/v1/sessions", {"name": "fuzzed"})
            made("/v1/sessions/fuzzed/send", {"text": "Hi", "max_tokens": 2})
            return {"name": "fuzzed"}
        if "/v1/conversations/" in path:
            said = {"items": [{"type": "message", "role": "user", "content": "Hi"}]}
            id = made("/v1/conversations", said)["id"]
            items = client.get(f"/v1/conversations/{id}/items").json()["data"]
            return {"id": id, "item": items[0]["id"]}
        if "/v1/responses/" in path:
            return {"id": made("/v1/responses", {"input": "Hi", "max_output_tokens": 2, "background": True})["id"]}
        if "/page/conversations/" in path and not path.endswith("/events"):  # which never end
            return {"id": made("/page/conversations", {}).get("id", "")}
    return {"model": "tiny"}


def answer(case: schemathesis.Case, server: Running) -> None:
    """Send a request as drawn, or (half of them) to what there is."""
    drawn = case.path_parameters
    if drawn and sum(len(str(value)) for value in drawn.values()) % 2:
        drawn.update({key: value for key, value in existing(case.path, server).items() if key in drawn})
    body = case.body
    for key in LENGTHS if isinstance(body, dict) else ():
        if isinstance(body.get(key), int) and 4 < body[key] < 2**31:  # allowed, and long to wait for
            body[key] = 4
    given = case.call(base_url=server.url, timeout=300)
    if given.status_code >= 400 or not any(word in case.path for word in NO_JSON):
        check(case.path, given.status_code, given.text)


# Those that read the largest bodies; the others when there is time for a long run.
some = schema.include(path_regex=r"^/v1/(chat/completions|responses|conversations|messages|sessions)$")


@some.parametrize()
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
def test_requests_drawn_from_the_document_are_answered_or_refused(case: schemathesis.Case, tiny: Running) -> None:
    answer(case, tiny)


@pytest.mark.soak
@schema.parametrize()
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_more_of_them_are_too(case: schemathesis.Case, tiny: Running) -> None:
    answer(case, tiny)
