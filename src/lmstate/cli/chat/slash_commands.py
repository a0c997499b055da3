"""Slash commands of a chat: a table. A new command is a function and a line here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lmstate.cli.chat.branches import drawn
from lmstate.cli.chat.conversation import ChatConversation
from lmstate.cli.chat.input import PROMPT, quoted
from lmstate.cli.chat.messages import shown
from lmstate.cli.output import size
from lmstate.vision.reader import PLURALS, kind_of_file


class ExitChat(Exception):
    """The chat is over."""


class AskQuestion(Exception):
    """A command ends in a question for the model, in the place of the last one."""

    @property
    def question(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Command:
    """`run(conversation, argument)` does it and returns what to tell. A ValueError is shown, and the chat goes on."""

    usage: str
    summary: str
    run: Callable[[ChatConversation, str], str]

    @property
    def name(self) -> str:
        return self.usage.split()[0]


def run_command(line: str, commands: Mapping[str, Command], conversation: ChatConversation) -> str:
    """Run a line that begins with a slash. Returns what to tell. Raises ValueError for an unknown command."""
    name, _, argument = line.partition(" ")
    if name not in commands:
        raise ValueError(f"there is no command {name}; /help lists them")
    command = commands[name]
    if argument.strip() and command.usage == name:
        raise ValueError(f"{name} takes no argument")
    return command.run(conversation, argument.strip())


def complete(begun: str, commands: Mapping[str, Command], conversation: ChatConversation) -> list[str]:
    """The lines that the beginning of one can become: commands, and their branches, settings and files."""
    name, space, argument = begun.partition(" ")
    if not space:
        lines = [f"{each} " if command.usage != each else each for each, command in commands.items()]
    elif name == "/switch":
        lines = [f"{name} {branch}" for branch in conversation.branches if branch != conversation.current]
    elif name == "/set":
        lines = [f"{name} {setting} " for setting in conversation.settings()]
    elif name in ("/load", "/save", "/image", "/audio"):
        force = "--force " if name == "/save" and argument.startswith("--force ") else ""
        lines = [f"{name} {force}{path}" for path in _paths(argument.removeprefix(force))]
    else:
        lines = []
    return sorted(line for line in lines if begun.startswith("/") and line.startswith(begun))


def _paths(begun: str) -> list[str]:
    """The files and folders whose names begin so."""
    folder, _, _ = begun.rpartition("/")
    parent = f"{folder}/" if "/" in begun else ""
    try:
        found = list(Path(parent or ".").expanduser().iterdir())
    except (OSError, RuntimeError):  # of a home that is not known
        return []
    return [f"{parent}{path.name}{'/' if path.is_dir() else ''}" for path in found]


def _help(conversation: ChatConversation, argument: str) -> str:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:{width}}  {command.summary}" for command in COMMANDS.values()]
    lines += [f"{key:{width}}  {summary}" for key, summary in KEYS.items()]
    return "\n".join(lines)


def _exit(conversation: ChatConversation, argument: str) -> str:
    raise ExitChat


def _clear(conversation: ChatConversation, argument: str) -> str:
    held = conversation.held
    conversation.clear()
    stays = "; the system message stays" if conversation.system else ""
    return f"forgot {held} tokens{stays}; /undo brings them back"


def _tokens(conversation: ChatConversation, argument: str) -> str:
    return f"{conversation.held} tokens held, {len(conversation.messages)} messages"


def _memory(conversation: ChatConversation, argument: str) -> str:
    memory = conversation.memory()
    parts = ", ".join(f"{kind} {size(count)}" for kind, count in memory.items())
    return f"{size(sum(memory.values()))} for {conversation.held} tokens ({parts or 'nothing yet'})"


def _undo(conversation: ChatConversation, argument: str) -> str:
    if argument and not argument.isdecimal():
        raise ValueError(f"/undo takes a number of turns, not {argument!r}")
    if not argument and (what := conversation.undo_replacement()):
        return f"took back {what}; {conversation.held} tokens held"
    turns = int(argument or 1)
    cost = conversation.undo(turns)
    return f"took back {turns} turn{'s' * (turns > 1)}; {_priced(cost)}"


def _edit(conversation: ChatConversation, argument: str) -> str:
    if not argument:
        raise ValueError("/edit needs the question that takes the place of the last one")
    raise AskQuestion(argument)


def _image(conversation: ChatConversation, argument: str) -> str:
    return _attach(conversation, argument, "image")


def _audio(conversation: ChatConversation, argument: str) -> str:
    return _attach(conversation, argument, "audio")


def _attach(conversation: ChatConversation, argument: str, kind: str) -> str:
    if not argument:
        raise ValueError(f"/{kind} needs a file name")
    conversation.attach(Path(argument).expanduser(), kind)
    counts = Counter(map(kind_of_file, conversation.files))
    told = (f"{count} {PLURALS[each].removesuffix('s' * (count == 1))}" for each, count in counts.items())
    return f"{' and '.join(told)} will go with the next question"


def _regenerate(conversation: ChatConversation, argument: str) -> str:
    raise AskQuestion(conversation.last_question())


def _history(conversation: ChatConversation, argument: str) -> str:
    lines = []
    for message in conversation.messages:
        role, text = message["role"], shown(message)
        lines.append(text if role == "assistant" else quoted(text, PROMPT if role == "user" else "system: "))
    return "\n".join(lines) or "nothing was said yet"


def _system(conversation: ChatConversation, argument: str) -> str:
    if not argument:
        return conversation.system or "there is no system message; /system TEXT sets one"
    conversation.set_system(argument)
    return "the system message of the next answer is set"


def _set(conversation: ChatConversation, argument: str) -> str:
    name, _, value = argument.partition(" ")
    if name:
        conversation.set(name.replace("-", "_"), _number(value.strip()))
    return "\n".join(f"{name} {'off' if value is None else value}" for name, value in conversation.settings().items())


def _number(text: str) -> float | None:
    """The number that a setting is given as; None for "off"."""
    if text == "off":
        return None
    try:
        return float(text) if set(text) & set(".eEn") else int(text)
    except ValueError:
        raise ValueError(f"/set NAME NUMBER, or off; {text!r} was given") from None


def _fork(conversation: ChatConversation, argument: str) -> str:
    conversation.fork(argument)
    return f"on {argument} from here; /switch goes back"


def _switch(conversation: ChatConversation, argument: str) -> str:
    if not argument:
        raise ValueError(f"/switch needs the name of a branch; there are {', '.join(conversation.branches)}")
    cost = conversation.switch(argument)
    return f"on {argument}, {conversation.held} tokens; {_priced(cost)}"


def _tree(conversation: ChatConversation, argument: str) -> str:
    return drawn(conversation.branches, conversation.current)


def _save(conversation: ChatConversation, argument: str) -> str:
    force = argument.startswith("--force ")
    name = argument.removeprefix("--force ").strip()
    if not name:
        raise ValueError("/save needs a file name")
    path = Path(name).expanduser()
    conversation.save(path, force)
    return f"saved {conversation.held} tokens, {size(path.stat().st_size)}, to {name}"


def _load(conversation: ChatConversation, argument: str) -> str:
    if not argument:
        raise ValueError("/load needs a file name")
    cost = conversation.load(Path(argument).expanduser())
    return f"{conversation.held} tokens from {argument}; {_priced(cost)}"


def _priced(cost: int) -> str:
    return f"{cost} token{'s' * (cost != 1)} to recompute" if cost else "nothing to recompute"


KEYS = {
    "Ctrl-C": "stop the answer and keep what was said so far",
    "\\": "at the end of a line: the message continues on the next line",
    '"""': "begins and ends a message of several lines",
}
COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        Command("/help", "list the commands", _help),
        Command("/tokens", "show the number of tokens in the state", _tokens),
        Command("/memory", "show the bytes of the state by layer kind", _memory),
        Command("/undo [N]", "undo the last N turns (default 1), or the last /clear or /load", _undo),
        Command("/edit TEXT", "replace the last question with TEXT and keep its files", _edit),
        Command("/image FILE", "attach a picture to the next question", _image),
        Command("/audio FILE", "attach a WAV file to the next question", _audio),
        Command("/regen", "replace the last answer with a new one", _regenerate),
        Command("/history", "show the conversation", _history),
        Command("/system [TEXT]", "show the system message, or set it", _system),
        Command("/set [NAME NUMBER]", "show the sampling parameters or set one: /set temperature 0.7", _set),
        Command("/fork NAME", "begin a branch here and continue in it", _fork),
        Command("/switch NAME", "go to another branch", _switch),
        Command("/tree", "show the branches, where they differ, and the tokens they share", _tree),
        Command("/save [--force] FILE", "save the conversation and its state; --force replaces a file", _save),
        Command("/load FILE", "continue a saved conversation; /undo returns", _load),
        Command("/clear", "start a new conversation; /undo returns", _clear),
        Command("/exit", "leave (so does Ctrl-D)", _exit),
        Command("/quit", "the same", _exit),
    )
}
