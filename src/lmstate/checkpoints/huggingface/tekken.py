"""Mistral's tekken.json: the only tokenizer of many of its checkpoints, which have no chat template either.

The ids of special tokens come first, then those of byte strings in the order in which they are merged. The chat
template writes what mistral-common writes for the version of the file.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.tokenizer_json import (
    added_token,
    all_splits,
    byte_level,
    byte_pieces,
    document,
    split,
    surrounding,
)
from lmstate.errors import ModelError
from lmstate.files.json_object import read_object
from lmstate.text.tokenizer import TokenizerFiles

NAME = "tekken.json"
MOST_TOKENS = 2**20
# Of files up to version 7 that list none.
SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
VERSIONS = ("v3", "v7", "v11", "v13")  # whose conversations have a template here


def tekken_files(path: Path) -> TokenizerFiles:
    """The tokenizer of a file. Raises `ModelError` for one that is damaged."""
    told = Config(read_object(path), str(path))
    config = told.fields("config", Config({}, f"{path}: config"))
    assert config is not None
    size = config.int("default_vocab_size", low=1, high=MOST_TOKENS)
    reserved = config.int("default_num_special_tokens", low=len(SPECIAL), high=size)
    special = _special(told, reserved)
    listed = _texts(told.get("vocab"), "token_bytes", str(path), 2 * MOST_TOKENS)[: size - reserved]
    if len(listed) < size - reserved:
        raise ModelError(f"{path} has {len(listed)} tokens, and should have {size - reserved}; it is damaged")
    vocabulary = byte_pieces(listed, str(path))
    merges = all_splits(vocabulary, {})
    ids = {token: index for index, token in enumerate(special)}
    ids |= {piece: reserved + rank for piece, rank in vocabulary.items()}
    if len(ids) != size:
        raise ModelError(f"{path} has {size - len(ids)} tokens twice; it is damaged")
    made = document(ids, merges, ignore_merges=True)
    made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split(config.str("pattern")), byte_level(False)]}
    made["decoder"] = byte_level(True)
    made["added_tokens"] = [added_token(index, token, True) for index, token in enumerate(special)]
    made["post_processor"] = surrounding("<s>", None, ids)
    settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    version = config.str("version", default="")
    if version in VERSIONS:
        settings["chat_template"] = chat_template(version, special)
    return TokenizerFiles(json.dumps(made, ensure_ascii=False), settings)


def _special(told: Config, reserved: int) -> list[str]:
    """The special tokens by id, those that have no name yet included."""
    listed = told.get("special_tokens")
    names = list(SPECIAL) if listed is None else _texts(listed, "token_str", str(told.where), reserved)
    names += [f"<SPECIAL_{index}>" for index in range(len(names), reserved)]
    if missing := {"<unk>", "<s>", "</s>", "<pad>"} - set(names):
        raise ModelError(f"{told.where} has no special token {min(missing)}; it is damaged")
    return names


def _texts(listed: Any, name: str, where: str, most: int) -> list[str]:
    """A field of each of a list's objects, in the order of their ranks from 0 on."""
    if not isinstance(listed, list) or len(listed) > most:
        raise ModelError(f"{where} must have a list of at most {most} objects with {name!r}; it is damaged")
    for rank, item in enumerate(listed):
        if not isinstance(item, dict) or item.get("rank") != rank or not isinstance(item.get(name), str):
            raise ModelError(f"{where} must have rank {rank} with {name!r} at place {rank} of a list; it is damaged")
    return [item[name] for item in listed]


def chat_template(version: str, special: Collection[str]) -> str:
    """A template that writes conversations as mistral-common does (its `InstructTokenizer` of this version).

    special: the tokens of the file, which tell whether there are thoughts and sounds.
    """
    number = int(version[1:])
    return "".join([
        MACROS.replace("SOUND", SOUND if "[BEGIN_AUDIO]" in special else ""),
        SYSTEM_IN_USER if number < 7 else SYSTEM,
        TOOLS.replace("PLACE", "first" if number >= 13 else "last"),
        RESULT_OBJECT if number < 7 else RESULT if number < 13 else RESULT_ALONE,
        CALL_LIST if number < 11 else CALLS.replace("CALL_ID", "[CALL_ID]{{ call.id }}" if number < 13 else ""),
        THOUGHT if number >= 13 and "[THINK]" in special else "",
        CONVERSATION,
    ])  # fmt: skip


SOUND = """{% elif part.type == "audio" %}[BEGIN_AUDIO][AUDIO]"""
# The parts of templates: macros, and the loop that calls them.
MACROS = """
{%- macro text(content) %}{% if content is string %}{{ content }}{% else %}
{%- for part in content or [] %}{% if part.type == "text" %}
{%- if loop.previtem is defined and loop.previtem.type == "text" %}{{ "\\n\\n" }}{% endif %}{{ part.text }}
{%- elif part.type == "image" %}[IMG]SOUND{% endif %}{% endfor %}{% endif %}{% endmacro %}
{%- set users = namespace(first=-1, last=-1, system=[]) %}
{%- for m in messages %}{% if m.role == "user" %}{% set users.last = loop.index0 %}
{%- if users.first < 0 %}{% set users.first = loop.index0 %}{% endif %}
{%- elif m.role == "system" %}{% set users.system = users.system + [text(m.content)] %}{% endif %}{% endfor %}
{%- macro arguments(call) %}{% set given = call.function.arguments %}
{{- given if given is string else given | tojson }}{% endmacro %}
{%- macro thought(m) %}{% endmacro %}"""
SYSTEM = """
{%- macro system(m) %}[SYSTEM_PROMPT]{{ text(m.content) }}[/SYSTEM_PROMPT]{% endmacro %}
{%- macro instruction(index) %}{% endmacro %}"""
SYSTEM_IN_USER = """
{%- macro system(m) %}{% endmacro %}
{%- macro instruction(index) %}{% if users.system and index == users.last %}
{{- users.system | join("\\n\\n") }}{{ "\\n\\n" }}{% endif %}{% endmacro %}"""
TOOLS = """
{%- macro listed(index) %}{% if tools and index == users.PLACE %}[AVAILABLE_TOOLS][
{%- for tool in tools %}{"type": "function", "function": {"name": {{ tool.function.name | tojson }}, "description": {{
(tool.function.description or "") | tojson }}, "parameters": {{ tool.function.parameters | tojson }}}}
{%- if not loop.last %}, {% endif %}{% endfor %}][/AVAILABLE_TOOLS]{% endif %}{% endmacro %}"""
# An object or a list of JSON is written as it is; mistral-common reads and writes it again.
RESULT_OBJECT = """
{%- macro result(m) %}{% set said = text(m.content) %}[TOOL_RESULTS]{"content": {{
said if said[:1] in ("{", "[") else said | tojson }}, "call_id": {{ m.tool_call_id | tojson }}}[/TOOL_RESULTS]
{%- endmacro %}"""
RESULT = """
{%- macro result(m) %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ text(m.content) }}[/TOOL_RESULTS]
{%- endmacro %}"""
RESULT_ALONE = "{% macro result(m) %}[TOOL_RESULTS]{{ text(m.content) }}[/TOOL_RESULTS]{% endmacro %}"
CALL_LIST = """
{%- macro calls(m) %}[TOOL_CALLS][
{%- for call in m.tool_calls %}{"name": {{ call.function.name | tojson }}, "arguments": {{ arguments(call) }}
{%- if call.id %}, "id": {{ call.id | tojson }}{% endif %}}
{%- if not loop.last %}, {% endif %}{% endfor %}]{% endmacro %}"""
CALLS = """
{%- macro calls(m) %}{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}CALL_ID[ARGS]
{{- arguments(call) }}{% endfor %}{% endmacro %}"""
THOUGHT = """
{%- macro thought(m) %}{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{% endmacro %}"""
CONVERSATION = """
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == "system" %}{{ system(m) }}
{%- elif m.role == "user" %}{{ listed(loop.index0) }}[INST]{{ instruction(loop.index0) }}{{ text(m.content) }}[/INST]
{%- elif m.role == "tool" %}{{ result(m) }}
{%- elif m.role == "assistant" %}{{ thought(m) }}{{ text(m.content).rstrip(" ") }}
{%- if m.tool_calls %}{{ calls(m) }}{% endif %}{{ eos_token }}
{%- else %}{{ raise_exception("a message has the role " ~ m.role ~ "; expected system, user, assistant or tool") }}
{%- endif %}
{%- endfor %}"""
