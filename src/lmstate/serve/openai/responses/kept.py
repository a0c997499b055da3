"""State of the Responses API: responses, conversations, and the responses that are made in the background."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from lmstate.serve.openai.responses.background import BackgroundResponses
from lmstate.serve.openai.responses.conversation_store import ResponseConversations
from lmstate.serve.openai.responses.store import ResponseStore
from lmstate.serve.settings import Settings


class KeptResponses:
    """The stores of one server, and its background responses."""

    def __init__(self, settings: Settings) -> None:
        self.responses = ResponseStore(settings.folder, settings.stored_responses)
        self.conversations = ResponseConversations(settings.folder, settings.stored_responses)
        self.background = BackgroundResponses()

    def find_item(self, id: str) -> dict[str, Any] | None:
        """An item of a stored response or conversation."""
        return self.responses.find_item(id) or self.conversations.find_item(id)

    async def close(self) -> None:
        """Wait for the background responses, whose requests were cancelled before, and close the stores."""
        await self.background.close()
        self.responses.close()
        self.conversations.close()


def kept_responses(request: Request) -> KeptResponses:
    kept: KeptResponses = request.app.state.responses
    return kept
