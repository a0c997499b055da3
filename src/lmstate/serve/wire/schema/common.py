"""Fields that the protocols and their local extensions share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Whole = Annotated[int, Meta(ge=0, le=2**31)]
Positive = Annotated[int, Meta(ge=1, le=2**31)]
Choices = Annotated[int, Meta(ge=1, le=128)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
TokenId = Annotated[int, Meta(ge=0)]
TokenIds = list[TokenId]
ShortText = Annotated[str, Meta(max_length=40)]
ItemId = Annotated[str, Meta(max_length=200)]
StopText = Annotated[str, Meta(max_length=1024)]
StopTexts = StopText | Annotated[list[StopText], Meta(max_length=64)]
GuidedChoice = str | Annotated[list[str], Meta(min_length=1, max_length=1000)]
JsonObject = dict[str, Any]
JsonSchema = dict[str, Any] | bool
_PROMPTS: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "array"}]}
Prompts = str | list[Annotated[Any, Meta(extra_json_schema=_PROMPTS)]]  # texts, ids or lists of ids
NoPromptLogprobs = Annotated[None, Meta(description="completions score a prompt with echo and logprobs")]


class Draws(Struct, kw_only=True):
    """Sampling as every protocol knows it. A field that is left out is as the model's makers suggest."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    seed: int | None = None


class Sampling(Draws, kw_only=True):
    """Sampling of tokens, with what other servers added."""

    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=4096)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Whole | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=4096)] | None = None
    thinking_token_budget: Whole | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    prompt_logprobs: NoPromptLogprobs = None


class StreamOptions(Struct, kw_only=True):
    """Extras of a stream beside the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with it: in every chunk


class StructuredOutputs(Struct, kw_only=True):
    """vLLM's way to say a constraint: one of these."""

    json: JsonSchema | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: GuidedChoice | None = None
    grammar: str | None = None


class SchemaFormat(Struct, kw_only=True):
    """A JSON schema with its name."""

    schema: JsonSchema
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    """The format of an answer's text."""

    type: Literal["text", "json_object", "json_schema", "grammar", "regex"]
    json_schema: SchemaFormat | None = None
    schema: JsonSchema | None = None  # responses have it here
    name: str | None = None
    strict: bool | None = None
    grammar: str | None = None
    pattern: str | None = None


class Generating(Sampling, kw_only=True):
    """Sampling, with what OpenAI's protocols and local servers say of an answer."""

    model: str | None = None
    stop: StopTexts | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    grammar: str | None = None
    guided_grammar: str | None = None
    guided_regex: str | None = None
    guided_json: JsonSchema | str | None = None
    guided_choice: GuidedChoice | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: JsonSchema | str | None = None  # llama-server, SGLang
    regex: str | None = None  # SGLang
    ebnf: str | None = None  # SGLang
    format: Literal["json", ""] | JsonSchema | None = None  # Ollama
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
