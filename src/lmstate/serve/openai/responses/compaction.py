"""Compaction items: a summary that stands for a conversation, written by the model, carried by the client."""

from __future__ import annotations

import base64
from typing import Any

from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.ids import new_id

TAG = "lmstate1."  # clients hand the content back as they got it: it is not theirs to read, nor secret
BEFORE = "Summary of the conversation so far:\n"
ASK = (
    "Summarize our conversation so far for someone who has to go on with it and has not seen it: what was asked, what "
    "was done and found, what was decided, what is left to do. Give names, numbers and paths as they are. Write the "
    "summary only."
)


def compaction_item(summary: str) -> dict[str, Any]:
    content = TAG + base64.urlsafe_b64encode(summary.encode()).decode()
    return {"id": new_id("cmp_"), "type": "compaction", "encrypted_content": content}


def summary_of(content: str, path: str) -> str:
    """The text of a compaction item, as a message of the user. Raises `ApiError` for one of another server."""
    try:
        if not content.startswith(TAG):
            raise ValueError
        return BEFORE + base64.b64decode(content.removeprefix(TAG), altchars=b"-_", validate=True).decode()
    except ValueError:
        raise ApiError(f"{path} was not made by this server: send the messages instead", param=path) from None
