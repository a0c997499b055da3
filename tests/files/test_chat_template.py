import pytest

from lmstate.errors import ModelError
from lmstate.text import chat_template
from lmstate.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hi <&>"}, {"role": "assistant", "content": " yo "}]


def render(source, **variables):
    return ChatTemplate(source).render(MESSAGES, **variables)


REAL = [
    # What templates in use are made of; each is also rendered by transformers.
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] | trim + eos_token }}\n{% endfor %}",
    "{%- for m in messages -%}\n  {%- if loop.first %}A{% elif loop.last %}Z{% endif -%}\n"
    "  {{- m.content }}\n{%- endfor %}",
    "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{{ messages | tojson }}{{ {'b': [1, 'é'], 'a': none} | tojson(indent=2) }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.length %}{% endfor %}{{ ns.n }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}",
    "{% macro say(m) %}[{{ m.role }}:{{ m.content[::-1] }}]{% endmacro %}{{ say(messages[0]) ~ say(messages[-1]) }}",
    "{% if tools is not none and tools %}T{% else %}N{% endif %}{{ undefined_name }}{{ bos_token is defined }}",
    "{% generation %}{{ messages[1].content }}{% endgeneration %}",
    "{{ '%s and %d' % ('a', 3) }}{{ 'x{}y'.format(1) }}{{ 'a-b'.split('-')[-1] }}{{ 'aXb'.replace('X', '__') }}",
    "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k ~ v }}{{ ', ' if not loop.last }}{% endfor %}{{ [1] + [2] }}",
    "{% set x %}  in {{ messages[0].role }}  {% endset %}{{ x.strip() }}{% filter upper %}abc{% endfilter %}",
    "{% if add_generation_prompt %}GO{% endif %}{{ range(3) | list }}{{ 'abc' is string }}{{ messages | length }}",
]


@pytest.mark.parametrize("source", REAL)
def test_text_equals_that_of_transformers(source):
    from transformers.utils.chat_template_utils import render_jinja_template

    known = {"bos_token": "<s>", "eos_token": "</s>"}
    (expected,), _ = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=True, **known)
    assert render(source, tools=None, add_generation_prompt=True, **known) == expected


@pytest.mark.parametrize(("content", "told"), [
    ([{"type": "text", "text": "Hello"}], r"message 1 has \[\{'type': 'text'"), (None, "message 1 has None"),
])  # fmt: skip
def test_the_message_that_has_no_text_is_named_where_a_template_fails(content, told):
    template = ChatTemplate("{% for message in messages %}{{ '> ' + message['content'] }}{% endfor %}")
    with pytest.raises(ModelError, match=told):
        template.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}])


def test_a_refusal_of_the_template_reaches_the_user():
    with pytest.raises(ModelError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


HOSTILE = {
    "endless loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "long output": "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "product": "{{ 'a' * 10000000000 }}",
    "list product": "{{ [1] * 10000000000 }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "width": "{{ 'a'.ljust(10000000000) }}",
    "centre": "{{ 'a' | center(10000000000) }}",
    "indent": "{{ 'a' | indent(10000000000) }}",
    "percent": "{{ '%9999999999d' % 3 }}",
    "percent star": "{{ '%*d' % (9999999999, 3) }}",
    "format": "{{ '{:9999999999}'.format(3) }}",
    "format nested": "{{ '{:{}}'.format(3, 9999999999) }}",
    "doubled by plus": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubled by tilde": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled by join": "{% set n = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x]|join %}{% endfor %}",
    "doubled by replace": "{% set n = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
    "squared by replace": "{% set n = namespace(x='a' * 9999) %}{% for i in range(9) %}"
    "{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
    "doubled by capture": "{% set n = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set b %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = b %}{% endfor %}",
    "doubled by macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='aa') %}"
    "{% for i in range(60) %}{% set n.x = m(n.x) %}{% endfor %}",
    "nested lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "nested dicts": "{% set n = namespace(x={}) %}{% for i in range(60) %}"
    "{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}",
    "big numbers": "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "endless loop": "{% for k in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "dunder": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "changes its input": "{{ messages.append(1) }}",
    "not jinja": "{% for %}",
    "deep source": "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    "long source": "x" * 2**21,
    "unknown filter": "{{ 1 | nope }}",
    "wrong types": "{{ messages + 3 }}",
    "division": "{{ 1 / 0 }}",
    "batches": "{{ [1] | batch(1000000000, 0) | list }}",
    "slices of a filter": "{{ [1] | slice(1000000000, 0) | list }}",
    "indent of json": "{{ [[1]] | tojson(indent=1000000000) }}",
    "indent of nested json": "{{ ([[[[[[[[1]]]]]]]] * 9999) | tojson(indent=9999) }}",
    "separators of json": "{{ ([1] * 99999) | tojson(separators=('x' * 99999, ':')) }}",
    "indent of many lines": "{{ ('\\n' * 99999) | indent(9999, true, true) }}",
    "digits": "{{ 1.5 | round(9999999, 'ceil') }}",
    "kept slices": "{% set n = namespace(x=[]) %}{% set a = 'a' * 9999999 %}"
    "{% for i in range(999) %}{% set n.x = n.x + [a[i:]] %}{% endfor %}",
    "kept slices of lists": "{% set n = namespace(x=[]) %}{% set a = [1] * 99999 %}"
    "{% for i in range(9999) %}{% set n.x = [a[i:], n.x] %}{% endfor %}",
    "bytes": "{% set n = namespace(x='a'.encode()) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "macros that call twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "nested tuples": "{% set n = namespace(x=(1,)) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}",
    "nested namespaces": "{% set n = namespace(x=namespace()) %}{% for i in range(60) %}"
    "{% set m = namespace() %}{% set m.a = n.x %}{% set m.b = n.x %}{% set n.x = m %}{% endfor %}{{ n.x }}",
    "searches of a long text": "{% set a = 'a' * 9999999 %}"
    "{% for i in range(99999) %}{% if 'b' in a %}{% endif %}{% endfor %}",
    "comparisons of long texts": "{% set a = 'a' * 9999999 %}{% set b = 'a' * 9999998 ~ 'a' %}"
    "{% for i in range(99999) %}{% if a == b %}{% endif %}{% endfor %}",
    "counts in a long text": "{% set a = 'a' * 9999999 %}{% for i in range(99999) %}{{ a.count('ab') }}{% endfor %}",
    "widths of many fields": "{{ ('{0:99999}' * 40000).format(1) }}",
    "widths of many percents": "{{ ('%99999d' * 100000) % ((1,) * 100000) }}",
    "widths in arguments": "{{ '%*d' % (99999999, 1) }}",
    "digits in arguments": "{{ '%.*f' % (99999999, 1.5) }}",
    "widths in fields": "{{ '{0:{1}}'.format(1, 99999999) }}",
    "widths in braces": "{{ '{{{0:>{1}}}}'.format(1, 99999999) }}",
    "widths of a map": "{{ ('{a:99999}' * 1000000).format_map({'a': 1}) }}",
    "long fields": "{{ ('%s' * 10000) | format(*((['x' * 100000],) * 10000)) }}",
    "long lists in fields": "{{ ('{0}' * 100000).format(['x' * 100000]) }}",
    "a text in a list many times": "{{ ((['x' * 1600000] * 8000) ~ '') | length }}",
    "such a list printed": "{{ ['x' * 1600000] * 8000 }}",
    "such a list joined": "{{ (['x' * 1600000] * 8000) | join }}",
    "such a list in groups": "{{ ([{'a': 'A' * 8000000}] * 99999) | groupby('a') }}",
    "tests that search": "{% set L = range(99999) | list %}{{ L | reject('in', L) | list | length }}",
    "filters in a row": "{{ ('a' * 2000000)" + " | select" * 40 + " | list | length }}",
    "filters in a row that keep nothing": "{{ ('a' * 2000000)" + " | map('upper')" * 40 + " | first }}"
    "{% for i in range(99) %}{{ ('a' * 2000000) | reject | first }}{% endfor %}",
    "no float": "{% set a = 1e999 %}{{ a }}",
    "wrapping": "{{ ('a' * 9999999) | wordwrap(1) }}",
    "quoting": "{{ ('%' * 9999999) | urlencode }}",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_templates_end_in_an_error(what, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 1.0)
    with pytest.raises(ModelError, match="chat template"):
        render(HOSTILE[what])


@pytest.mark.parametrize("said", ['{"id":1234567}', "100% of host:1234567", "{x} %123456d :99999999", "50%1000000"])
def test_what_a_message_says_is_no_format(said):
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1].lstrip('\\n').replace('a', 'a') }}{% endfor %}"
    assert ChatTemplate(source).render([{"role": "user", "content": said}]) == said


@pytest.mark.parametrize(
    "source",
    [
        "{% macro written(x) %}{{ x }}{% endmacro %}{{ written(messages[0].at) }}",
        "{{ '{}'.format(messages[0].at) }}",
        "{{ ('**{}**'.format(messages[0].at))[2:-2] }}",
        "{{ ('**%s**' % messages[0].at)[2:-2] }}",
        """{{ ('{{"at": {{"a": {}}}}}'.format(messages[0].at))[13:-2] }}""",
        "{{ dict(a=messages[0].at).a }}",
        "{% set n = namespace(a=messages[0].at) %}{{ n.a }}",
        "{{ none | default(messages[0].at, true) }}",
        "{{ (messages | selectattr('at', 'equalto', 1732500000) | list)[0].at }}",
    ],
)
def test_large_numbers_of_a_message_are_no_widths(source):
    assert ChatTemplate(source).render([{"role": "tool", "content": "", "at": 1732500000}]) == "1732500000"


def test_formats_of_templates_are_followed():
    source = (
        "{{ '{:>10}|{}|{x:.3f}'.format('ab', 2024, x=1.5) }}|{{ '%5.1f|%-6s' % (1.5, 'a') }}|{{ '%s' | format('x') }}"
    )
    assert ChatTemplate(source).render([]) == "        ab|2024|1.500|  1.5|a     |x"


def test_seconds_of_a_render_are_bounded(monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.05)
    with pytest.raises(ModelError, match="seconds"):
        render("{% for i in range(99999) %}{{ messages | tojson | length }}{% endfor %}")


def test_the_budget_is_that_of_one_conversation():
    template = ChatTemplate("{% for a in range(99999) %}{% endfor %}")
    for _ in range(30):
        template.render(MESSAGES)


def test_long_conversations_fit_the_budget():
    long = MESSAGES * 300
    source = (
        "{% for m in messages %}{{ (messages | selectattr('role', 'equalto', 'user') | list | length) }}{% endfor %}"
    )
    assert ChatTemplate(source).render(long) == "300" * 600
