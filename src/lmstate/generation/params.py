"""`SamplingParams`: how the answers to one prompt are generated, from HTTP, the command line and Python alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from lmstate.generation.grammar import Grammar, check_grammar
from lmstate.generation.sampling import Sampler
from lmstate.generation.stopping import as_stops
from lmstate.generation.thinking import TAIL, ThinkingFormat
from lmstate.language_model import DescribedModel
from lmstate.state.validate import flag, token_ids, whole_number
from lmstate.text.grammars.constraint import Constraint, of_format
from lmstate.text.thinking import thinking_markers

MAX_TOP_LOGPROBS = 1024
MAX_NEW_TOKENS = 256
CONSTRAINTS = ("json_schema", "regex", "grammar", "response_format")


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Sampler):
    """Sampling, limits, stops, log probabilities, grammar and thinking budget. Immutable.

    The fields of `Sampler`, and:

    max_new_tokens      at most this many tokens; 0 only reads the prompt
    min_tokens          no end-of-sequence or stop token before this many tokens, and no stop string within them
    n                   answers to the one prompt, which is read once; with a seed, answer i draws as row i of
                        `model.generate` does
    stop                text(s) that end the answer; nothing at or after them is returned
    include_stop_str_in_output  the text ends with the stop string that ended it, instead of before it
    stop_token_ids      end the answer like an end-of-sequence token
    ignore_eos          end-of-sequence tokens do not end the answer
    logprobs            log probabilities of the tokens of the answers, with this many of the most likely ones
    allowed_logprobs    those of the answers count only tokens that the grammar and `times_from` allow
    prompt_logprobs     the same for the prompt, all of which is then computed
    json_schema         the answer is JSON that fits this schema: an object, or its text
    regex               the answer matches this regular expression from its first character to its last
    grammar             the answer is of this grammar in Lark or GBNF; or an object that says what may come next, see
                        `Grammar`, of which each answer follows a copy
    response_format     one of these as OpenAI's protocol writes it: `{"type": "json_object"}` is any JSON object
    max_thinking_tokens  tokens of the thinking section; after them comes what the chat template ends it with, and the
                        answer

    Raises ValueError for values out of range.
    """

    max_new_tokens: int = MAX_NEW_TOKENS
    min_tokens: int = 0
    n: int = 1
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    allowed_logprobs: bool = False
    prompt_logprobs: int | None = None
    json_schema: Mapping[str, Any] | bool | str | None = None
    regex: str | None = None
    grammar: Grammar | str | None = None
    response_format: Mapping[str, Any] | None = None
    max_thinking_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checked: dict[str, Any] = {
            "max_new_tokens": _count("max_new_tokens", self.max_new_tokens),
            "min_tokens": _count("min_tokens", self.min_tokens),
            "n": _count("n", self.n, least=1),
            "stop": as_stops(self.stop),
            "include_stop_str_in_output": flag(self.include_stop_str_in_output, "include_stop_str_in_output"),
            "stop_token_ids": frozenset(token_ids(self.stop_token_ids, "stop_token_ids")),
            "ignore_eos": flag(self.ignore_eos, "ignore_eos"),
            "allowed_logprobs": flag(self.allowed_logprobs, "allowed_logprobs"),
        }
        for name in ("logprobs", "prompt_logprobs", "max_thinking_tokens"):
            if (given := getattr(self, name)) is not None:
                checked[name] = _count(name, given, most=MAX_TOP_LOGPROBS if name != "max_thinking_tokens" else None)
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} were given: an answer follows one of them")
        if self.grammar is not None and not isinstance(self.grammar, str):
            check_grammar(self.grammar)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def stops(self) -> tuple[str, ...]:
        return as_stops(self.stop)

    def ends(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end an answer, of a model with these end-of-sequence tokens."""
        return (frozenset() if self.ignore_eos else eos_ids) | frozenset(self.stop_token_ids)

    def compiled(self, model: DescribedModel, talk: Sequence[int] | None = None) -> SamplingParams:
        """These parameters with what constrains the answer as a `Grammar` of the model's tokens.

        talk: the ids of a conversation, whose answer may begin with a thinking section: what follows it is constrained.
        Raises `GrammarError` for a constraint that is wrong, unsupported or too large.
        """
        if (constraint := self.constraint) is None:
            return self
        lark = constraint.lark
        if talk is not None and (markers := thinking_markers(model.tokenizer.template_source)) is not None:
            end = model.tokenizer.decode(list(talk[-TAIL:]), False)
            if not markers.closed_by(end):
                lark = model.grammars.with_reasoning(lark, markers, markers.opened_by(end))
        grammar = model.grammars.compile(lark, constraint.param)
        return replace(self, grammar=grammar, json_schema=None, regex=None, response_format=None)

    @property
    def constraint(self) -> Constraint | None:
        """The constraint on the answer that is written, not compiled. Raises `GrammarError` for a wrong one."""
        if self.json_schema is not None:
            return Constraint.of_schema(self.json_schema, "json_schema")
        if self.regex is not None:
            return Constraint.of_pattern(self.regex, "regex")
        if self.response_format is not None:
            return of_format(self.response_format)
        return Constraint.of_grammar(self.grammar, "grammar") if isinstance(self.grammar, str) else None

    def check_together(self) -> None:
        """Raise ValueError for what does not fit together, whatever the model."""
        if self.min_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, more than max_new_tokens, which is {self.max_new_tokens}"
            )

    def check(self, model: DescribedModel) -> None:
        """Raise ValueError for what does not fit together or does not fit the model.

        Raises UnsupportedError for a limit on the thinking of a model whose chat template has no thinking section.
        """
        self.check_together()
        vocab = model.config.vocab_size
        for token, _ in self.biases:
            check_token(token, "logit_bias", vocab)
        for token in self.stop_token_ids:
            check_token(token, "stop_token_ids", vocab)
        if self.stop and not model.has_tokenizer:
            raise ValueError("stop strings were given, and this model has no tokenizer: give stop_token_ids")
        if self.max_thinking_tokens is not None:
            ThinkingFormat.of(model.tokenizer)


def sampling_params(params: Sampler | None, changes: dict[str, Any]) -> SamplingParams:
    """`params` with changes. A `Sampler` keeps the other parameters at their defaults.

    Raises ValueError for values out of range, TypeError for unknown names.
    """
    if params is None:
        return SamplingParams(**changes)
    if isinstance(params, SamplingParams):
        return replace(params, **changes) if changes else params
    if not isinstance(params, Sampler):
        raise ValueError(f"params is {params!r:.80}; give lmstate.SamplingParams, or None and options by name")
    sampler = {field.name: getattr(params, field.name) for field in fields(params)}
    return SamplingParams(**{**sampler, **changes})


def check_token(token: int, where: str, vocab: int) -> int:
    """A token id of the vocabulary. Raises ValueError for anything else."""
    number = whole_number(token, f"a token of {where}")
    if not 0 <= number < vocab:
        raise ValueError(f"{where} has token {number}; this model's are 0 to {vocab - 1}")
    return number


def _count(name: str, value: int, least: int = 0, most: int | None = None) -> int:
    number = whole_number(value, name)
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name} is {number}; it must be {least} or more" + (f", at most {most}" if most else ""))
    return number
