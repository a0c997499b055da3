"""Reranking: the probability of yes against no, of the model's own logits after the question about a document."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmstate.serve.openai import rerank
from tests.serve.running import Running

DOCUMENTS = ["Paris is in France.", "Cats sleep.", "", "The Seine flows through Paris."]


def asked(server: Running, path: str = "/v1/rerank", **fields: Any) -> Any:
    with server.client() as client:
        return client.post(path, json={"query": "Where is Paris?", "documents": DOCUMENTS, **fields})


def score(server: Running, document: str) -> float:
    model = server.engine.model
    user = f"<Instruct>: {rerank.INSTRUCTION}\n<Query>: Where is Paris?\n<Document>: {document}"
    messages = [{"role": "system", "content": rerank.TASK}, {"role": "user", "content": user}]
    logits = model([model.tokenizer.chat(messages, add_generation_prompt=True)])[0, -1]
    answers = [model.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no")]
    return float(torch.softmax(logits[answers], -1)[0])


@pytest.mark.parametrize("listed", [rerank.LISTED, 1])
def test_scores_are_those_of_the_models_logits(tiny: Running, listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rerank, "LISTED", listed)  # with 1, the other answer is asked for by itself
    told = asked(tiny).raise_for_status().json()
    expected = [score(tiny, document) for document in DOCUMENTS]
    assert [result["index"] for result in told["results"]] == sorted(range(4), key=lambda i: -expected[i])
    for result in told["results"]:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=1e-5)
    assert told["usage"]["total_tokens"] == told["usage"]["prompt_tokens"] > 0


def test_the_best_documents_are_given_as_objects_and_texts(tiny: Running) -> None:
    whole = asked(tiny).json()["results"]
    few = asked(tiny, "/v2/rerank", top_n=2, return_documents=True).json()["results"]
    assert few == [{**result, "document": {"text": DOCUMENTS[result["index"]]}} for result in whole[:2]]
    objects = asked(tiny, "/rerank", documents=[{"text": text, "id": 1} for text in DOCUMENTS], model="tiny").json()
    assert objects["results"] == whole and objects["model"] == "tiny"


def test_a_query_is_read_once(tiny: Running) -> None:
    before = tiny.engine.stats()["computed_tokens"]
    told = asked(tiny, query="A query that nobody asked before: " + "word " * 60).json()
    computed = tiny.engine.stats()["computed_tokens"] - before
    assert computed < told["usage"]["prompt_tokens"] / 2


def test_documents_are_cut_where_that_is_asked_for(tiny: Running) -> None:
    cut = asked(tiny, documents=["abcdef" * 500, "abc"], max_tokens_per_doc=3).json()["results"]
    assert cut[0]["relevance_score"] == cut[1]["relevance_score"]
    answer = asked(tiny, documents=["abc", "abcdef" * 500])
    assert answer.status_code == 400 and "documents[1]" in answer.json()["error"]["message"]


@pytest.mark.parametrize("fields", [{"documents": []}, {"documents": [1]}, {"query": None}, {"top_n": 0}])
def test_wrong_requests_are_refused(tiny: Running, fields: dict[str, Any]) -> None:
    assert asked(tiny, **fields).status_code == 400
