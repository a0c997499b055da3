"""State of the Responses API: responses, conversations, and the responses that are made in the background."""

from __future__ import annotations

from time import time
from typing import Any

from starlette.requests import Request

from lmstate.serve.openai.responses.background import BackgroundResponses
from lmstate.serve.openai.responses.conversation_store import ResponseConversations
from lmstate.serve.openai.responses.store import ALIVE_SECONDS, ResponseStore, StoredResponse
from lmstate.serve.settings import Settings
from lmstate.serve.wire.owned_records import OwnedRecords


class KeptResponses:
    """The stores of one server, and its background responses."""

    def __init__(self, records: OwnedRecords, settings: Settings) -> None:
        self._shared = records.shared
        self.responses = ResponseStore(records, settings.stored_responses)
        self.conversations = ResponseConversations(records, settings.stored_responses)
        self.background = BackgroundResponses()

    def find_item(self, id: str) -> dict[str, Any] | None:
        """An item of a stored response or conversation of the caller."""
        return self.responses.find_item(id) or self.conversations.find_item(id)

    def made_elsewhere(self, stored: StoredResponse) -> bool:
        """Whether another process of the store makes a response still, as far as it is known."""
        recent = abs(time() - stored.stored_at) < ALIVE_SECONDS
        return self._shared and recent and not stored.ended and self.background.running(stored.id) is None

    async def close(self) -> None:
        """Wait for the background responses, whose requests were cancelled before."""
        await self.background.close()


def kept_responses(request: Request) -> KeptResponses:
    kept: KeptResponses = request.app.state.responses
    return kept
