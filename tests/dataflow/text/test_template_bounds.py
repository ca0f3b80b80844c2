"""Chat templates that would take memory or time without an end are an error soon; others render as before."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from text_kit import MARKED, tokenizer

from dataflow import ChatTemplate
from dataflow.text import template_bounds
from dataflow.text.chat_template import ChatText
from dataflow.text.template_bounds import TemplateLimitError

__all__ = ["tokenizer"]
pytestmark = pytest.mark.timeout(30)
MESSAGES = [{"role": "user", "content": "hi"}]
DOUBLED = {
    "by ~": "ns.s ~ ns.s",
    "by +": "ns.s + ns.s",
    "by join": "[ns.s, ns.s]|join",
    "by a list": "[ns.s, ns.s]",
    "by a tuple": "(ns.s, ns.s)",
    "by a dict": "{'a': ns.s, 'b': ns.s}",
    "by dict()": "dict(a=ns.s, b=ns.s)",
    "by format": "'{}{}'.format(ns.s, ns.s)",
    "by %": "'%s%s' % (ns.s, ns.s)",
    "by replace": "'aa'.replace('a', ns.s|string)",
}
WITH_S = "{% set s = 'a ' * 5000 %}{{ "
GROWING = {
    "a power": "{{ 9**(9**9) }}",
    "a power of variables": "{% set a = 9 %}{% set b = a**a %}{{ a**b }}",
    "a product of text": "{{ 'x' * 10**10 }}",
    "a product that a name has": "{% set n = 10**10 %}{{ (n * 'x')|length }}",
    "a product of a list": "{{ ([1] * 10**10)|length }}",
    "center": "{{ 'x'|center(10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "zfill": "{{ 'x'.zfill(10**10) }}",
    "%d": "{{ '%10000000000d' % 1 }}",
    "%*d": "{{ '%*d' % (10**10, 1) }}",
    "the filter format": "{{ '%10000000000d'|format(1) }}",
    "the method format": "{{ '{:>10000000000}'.format(1) }}",
    "a nested width": "{{ '{:>{w}}'.format(1, w='9999999999') }}",
    "format_map": "{{ '{a:9999999999}'.format_map({'a': 1}) }}",
    "the filter replace": WITH_S + "s|replace('a', s)|length }}",
    "the method replace": WITH_S + "s.replace('a', s)|length }}",
    "the filter join": WITH_S + "range(100000)|join(s)|length }}",
    "the method join": WITH_S + "s.join(s)|length }}",
    "indent": WITH_S + "('\n' * 5000)|indent(s)|length }}",
    "wordwrap": WITH_S + "s|wordwrap(1, true, s)|length }}",
    "expandtabs": "{{ ('\t' * 5000).expandtabs(100000)|length }}",
    "tojson": "{{ ([1] * 5000)|tojson(indent=50000) }}",
    "sum": "{{ ([[1]] * 5000)|sum(start=[])|length }}",
    "map": "{{ range(100000)|map('string')|map('center', 100000)|list|length }}",
    "batch": "{{ [1]|batch(10**10, 'x')|list }}",
    "a loop in a loop": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "text in a loop": "{% set t %}{% for i in range(100000) %}" + "x" * 1000 + "{% endfor %}{% endset %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
}


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that are reached in milliseconds."""
    monkeypatch.setattr(template_bounds, "_UNITS", 1 << 20)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("how", DOUBLED)
def test_what_doubles_in_a_loop_is_an_error(how: str) -> None:
    loop = f"{{% for i in range(60) %}}{{% set ns.s = {DOUBLED[how]} %}}{{% endfor %}}{{{{ ns.s|length }}}}"
    with pytest.raises(TemplateLimitError, match="more text or lists than a chat of this size can need"):
        ChatText("{% set ns = namespace(s='ab') %}" + loop, {}).rendered(MESSAGES)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("what", GROWING)
def test_an_operation_that_would_make_too_much_does_not_run(what: str) -> None:
    with pytest.raises(TemplateLimitError, match="it is broken or means harm"):
        ChatText(GROWING[what], {}).rendered(MESSAGES)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("what", ["the filter replace", "the method replace"])
def test_what_would_be_too_much_is_refused_before_it_takes_memory(what: str) -> None:
    text = ChatText(GROWING[what], {})
    tracemalloc.start()
    try:
        with pytest.raises(TemplateLimitError, match="more text or lists"):
            text.rendered(MESSAGES)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20  # of 50 MB that it would make
    finally:
        tracemalloc.stop()


def test_a_rendering_that_computes_for_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bounds, "_CPU_S", 0.0)
    loop = "{% for i in range(100) %}{% if messages == messages %}{% endif %}{% endfor %}"
    with pytest.raises(TemplateLimitError, match="computes for longer than 0 s"):
        ChatText(loop, {}).rendered(MESSAGES)


def test_a_sample_that_holds_itself_is_an_error() -> None:
    messages: list[dict[str, object]] = [{"role": "user", "content": "hi"}]
    messages[0]["content"] = messages
    with pytest.raises(Exception, match=r"more text or lists|[Cc]ircular"):
        ChatText("{{ messages|tojson }}", {}).rendered(messages)


def test_long_chats_have_room(tokenizer: Path) -> None:
    long = [{"role": role, "content": "word " * 200_000} for role in ("user", "assistant") * 2]
    made = ChatTemplate(tokenizer, template=MARKED, variables={"bos_token": ""}).text.rendered(long)
    assert len(made.text) > 4_000_000
    assert len(made.spans) == 2


def test_values_are_what_jinja_makes_of_them() -> None:
    source = (
        "{% set x = [1, 'a', none, 2.5] %}{{ x }}{{ x ~ 1 ~ true }}{{ {'a': x}|tojson }}{{ 7 // 2 }}"
        "{{ 2**10 }}{{ 'b' * 3 }}{{ '%05.1f|%s' % (1.25, 'z') }}{{ 'a-b'.replace('-', '+') }}"
        "{{ x|join(', ') }}"
        "{{ (1, 2)[1] }}{{ 'ab'|center(6) }}{{ [1, 2]|sum }}{{ 'a b'.split() }}"
        "{% for a, b in {'k': 'v'}.items() %}{{ a ~ b }}{% endfor %}"
    )
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = lambda value: '{"a": [1, "a", null, 2.5]}'
    assert ChatText(source, {}).rendered(MESSAGES).text == plain.from_string(source).render()
