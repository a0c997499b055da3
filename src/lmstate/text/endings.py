"""Tokens that end an answer: the names that published models give them."""

from __future__ import annotations

import re
from collections.abc import Callable

# The names that llama.cpp ends an answer at, and more that the configs of published models name.
ENDINGS = (
    *("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>"),
    *("<|calls|>", "<|flush|>", "<|endoftext|>", "<|end_of_text|>", "<|endofturn|>", "[|endofturn|]"),
    *("<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "<EOT>", "_<EOT>", "<|EOT|>", "[EOT]"),
    *("[EOS]", "<eos>", "</s>", "[e~[", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>"),
    "<|content_model_end_sampling|>",
    # Padding, the next file and the next repository of a model that fills in code.
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "<|file_sep|>"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
)
CONTROL_NAME = re.compile(r"<\|\w+\|>")  # no text has a token of this form but a control token

IdOf = Callable[[str], int | None]


def end_ids(given: set[int], id_of: IdOf) -> frozenset[int]:
    """The ids that end an answer: those that the files name (`given`), and those whose names say so.

    In the formats with channels (gpt-oss, Solar Open) `<|end|>` ends a message of several, and not the answer, and so
    does `<|eom|>` of Muse Glimmer. In Gemma's vocabularies `</s>` is a tag of HTML.
    """
    named = {name: id for name in ENDINGS if (id := id_of(name)) is not None}
    channels = "<|return|>" in named and ("<|call|>" in named or id_of("<|channel|>") is not None)
    if channels or ("<|flush|>" in named and ("<|call|>" in named or "<|calls|>" in named)):
        given = given - {named.pop("<|end|>", -1)}
    if "<|eot|>" in named and id_of("<|message|>") is not None:
        given = given - {named.pop("<|eom|>", -1)}
    if id_of("<start_of_turn>") is not None or "<|tool_response>" in named:
        named.pop("</s>", None)
    return frozenset(given | set(named.values()))
