"""What engines, sessions, requests and tokenizers look like in a notebook."""

from __future__ import annotations

import lmstate
from tests.engine.chat import chatting


def test_each_tells_what_it_is_and_does() -> None:
    model = chatting()
    assert repr(model.tokenizer) == f"Tokenizer({model.tokenizer.vocab_size} tokens, ends <end>, a chat template)"
    with lmstate.Engine(model, rows=3) as engine:
        assert repr(engine).endswith(", rows=3: 0 waiting, 0 reading, 0 answering)")
        session = engine.session("work")
        assert repr(session) == "Session('work', idle: 0 tokens, 0 messages)"
        request = session.send("abcd", max_new_tokens=5, ignore_eos=True)
        request.result(600)
        prompt = len(request.prompt)
        assert repr(request) == f"Request(ended: {prompt} of {prompt} prompt tokens, 5 generated)"
        assert repr(session) == f"Session('work', idle: {prompt + 5} tokens, 2 messages)"
    assert repr(engine).endswith("rows=3: closed)")
