"""What may be typed in a chat besides questions: a table of commands. A new one is a function and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lmstate.cli.conversation import Conversation
from lmstate.cli.output import size


class Leave(Exception):
    """The chat is over."""


@dataclass(frozen=True)
class Command:
    """`run(conversation, argument)` does it and returns what to tell. A ValueError is shown, and the chat goes on."""

    usage: str
    summary: str
    run: Callable[[Conversation, str], str]

    @property
    def name(self) -> str:
        return self.usage.split()[0]


def run_command(line: str, commands: Mapping[str, Command], conversation: Conversation) -> str:
    """Run a line that begins with a slash. Returns what to tell. Raises ValueError for an unknown command."""
    name, _, argument = line.partition(" ")
    if name not in commands:
        raise ValueError(f"there is no command {name}; /help lists them")
    command = commands[name]
    if argument.strip() and command.usage == name:
        raise ValueError(f"{name} takes no argument")
    return command.run(conversation, argument.strip())


def _help(conversation: Conversation, argument: str) -> str:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:{width}}  {command.summary}" for command in COMMANDS.values()]
    return "\n".join([*lines, f"{'Ctrl-C':{width}}  stop the answer; what was said so far stays"])


def _exit(conversation: Conversation, argument: str) -> str:
    raise Leave


def _reset(conversation: Conversation, argument: str) -> str:
    held = conversation.state.lengths[0]
    conversation.reset()
    return f"forgot {held} tokens; the system message stays" if conversation.system else f"forgot {held} tokens"


def _tokens(conversation: Conversation, argument: str) -> str:
    held = conversation.state.lengths[0]
    return f"{held} tokens held, {len(conversation.messages)} messages"


def _memory(conversation: Conversation, argument: str) -> str:
    memory = conversation.state.memory()
    parts = ", ".join(f"{kind} {size(count)}" for kind, count in memory.items())
    return f"{size(sum(memory.values()))} for {conversation.state.lengths[0]} tokens ({parts or 'nothing yet'})"


COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        Command("/help", "show this", _help),
        Command("/tokens", "how many tokens the state holds", _tokens),
        Command("/memory", "bytes that the state holds, by layer kind", _memory),
        Command("/reset", "begin again", _reset),
        Command("/exit", "leave (so does Ctrl-D)", _exit),
    )
}
