"""What a chat template may do while one conversation is rendered."""

import tracemalloc

import pytest

from gateway.prompt.render.clock import Clock
from gateway.prompt.render.compiler import Compiler
from gateway.prompt.render.template import ChatTemplate, TemplateError

from ....calls import counting_calls

CHAT = [{"role": "user", "content": "hi"}]
AGAIN = "{%% set ns = namespace(x=%s) %%}{%% for i in range(40) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x }}"
HALF = "{% set s = 'a' * 500000 %}"
BOMBS = [
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(30) }}",
    "{% for x in range(2) recursive %}{% if loop.depth < 30 %}{{ loop(range(2)) }}{% endif %}{% endfor %}",
    "{% block a %}{% if messages %}{{ self.a() }}{{ self.a() }}{% endif %}{% endblock %}",
    "{% for x in range(99999) if range(99999)|list|length == 0 %}{% endfor %}",
    "{% for x in range(9999) %}" + "{% if x %}{% endif %}" * 999 + "{% endfor %}",
    AGAIN % ("'a'", "ns.x + ns.x"),
    AGAIN % ("'a'", "ns.x ~ ns.x"),
    AGAIN % ("['a']", "[ns.x, ns.x]"),
    AGAIN % ("['a']", "ns.x + ns.x"),
    AGAIN % ("(1,)", "{(ns.x, ns.x): 1}|first"),
    AGAIN % ("9", "ns.x * ns.x"),
    AGAIN % ("'a'", "'%s%s' % (ns.x, ns.x)"),
    AGAIN % ("'a'", "'{0}{0}'.format(ns.x)"),
    "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "{% set a = namespace() %}{% set a.x = a %}{{ a }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1, varargs, varargs) }}{% else %}{{ varargs }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{{ 'a' * 10 ** 9 }}",
    "{{ 10 ** (10 ** 9) }}",
    "{{ 'a'|center(1000000000) }}",
    "{{ ['a']|map('center', 1000000000)|list }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ [[1]]|tojson(indent=1000000000) }}",
    "{{ ('a\n' * 9999)|indent(99999) }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%((a))1000000000d' % {'(a)': 1} }}",
    "{{ '%.1000000000d' % 1 }}",
    "{{ '%.*f' % (1000000000, 1.5) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format('a', w=1000000000) }}",
    "{{ [['a'] * 9999] * 99|sum(start=[])|length }}",
    "{{ ([['a'] * 999] * 9999)|sum(start=[]) }}",
    "{{ '{:{}}'.format('a', '1000000000') }}",
    "{{ range(99999)|join('a' * 99999) }}",
    "{{ ('a' * 99999).join(range(99999)|map('string')) }}",
    "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}",
    "{{ ('a' * 99999)|replace(new='b' * 99999, old='a') }}",
    "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "{{ ('é' * 500000).encode('punycode') }}",
    "{{ ['a']|map('striptags')|list }}",
    "{{ ('a' * 200000).rfind('ab' + 'a' * 100000) }}",
    "{% for i in range(9999) %}{% set x = ('a' * 2000).rsplit('ab' + 'a' * 1000) %}{% endfor %}",
    "{{ ('a' * 200000).strip('b' * 200000 ~ 'a') }}",
    "{{ ('a' * 200000)|trim('b' * 200000 ~ 'a') }}",
    "{{ range(4)|map(attribute='a.' * 200000, default={})|list|length }}",
    "{{ [messages]|selectattr('a.' * 200000)|list }}",
    "{{ messages|groupby('a.' * 200000)|list }}",
    "{{ messages|sort(attribute='a,' * 200000)|list }}",
    "{{ messages|join('', attribute='a.' * 200000) }}",
    "{{ [5]|join('', 'real.' * 200000) }}",
    "{{ messages|sort(false, false, 'role,' * 200000)|list }}",
    "{{ [5]|unique(false, 'real.' * 200000)|list }}",
    "{{ [messages]|map('groupby', 'role.' * 200000)|list }}",
    "{{ [[5]]|map('max', attribute='real.' * 200000)|list }}",
    "{% set x = range(16000)|list %}{% for i in range(99) %}{{ x|map(attribute='a.a.a.a', default=1)|list|length }}{% endfor %}",
    "{{ range(0, 6000 * 2305843009213693951, 2305843009213693951)|unique|list|length }}",
    "{{ 5|round(-1000000000) }}",
    "{{ strftime_now('%255Y' * 99999) }}",
    HALF + "{% for i in range(99999) %}{% if 'b' in s %}{% endif %}{% endfor %}",
    HALF + "{{ range(99999)|map('string')|select('in', s)|list }}",
    HALF + "{% for i in range(99999) %}{% set t = s[1:] %}{% endfor %}",
    HALF + "{% for i in range(99999) %}{{ s }}{% endfor %}",
    "{{ [-999999999999]|map(' step')|list }}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
]  # fmt: skip


@pytest.mark.parametrize("source", BOMBS)
def test_a_template_that_would_never_end_or_fill_the_memory_fails_early(source):
    def render():
        template = ChatTemplate(source, {})
        with pytest.raises(TemplateError):
            template.render(CHAT, None, {})
        Compiler(source, {}, [], Clock())

    tracemalloc.start()
    try:
        _, calls = counting_calls(render)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert calls < 250_000 + 50 * len(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% for n in messages %}{% if n.role == 'system' %}x{% endif %}{% endfor %}{{ m.content }}"
        "{% endfor %}",
        "{% set ns = namespace(x='') %}{% for m in messages[::-1] %}{% set ns.x = ns.x ~ m.content %}{% endfor %}{{ ns.x }}",
        "{% for m in messages %}{{ m.content.split('</think>')[-1].strip('\n') | replace('hello', 'good day') }}{% endfor %}",
        "{% macro depth(x) %}{{ x|tojson(indent=4) }}{% endmacro %}{% for m in messages %}{{ depth(m) }}{% endfor %}",
        "{{ messages|selectattr('role', 'eq', 'user')|map(attribute='content')|join('<|sep|>') }}",
    ],
)
@pytest.mark.parametrize(("messages", "words"), [(1, 100_000), (1000, 10)])
def test_a_long_conversation_is_rendered_however_often_a_template_goes_over_it(source, messages, words):
    chat = [{"role": "user", "content": "hello " * words}] * messages
    assert ChatTemplate(source, {}).render(chat, None, {})


@pytest.mark.parametrize(
    ("source", "made"),
    [
        ("{{ 'id-20250115-%s' % messages[0].content }}", "id-20250115-tel 0301234567"),
        ("{{ 'id-20250115 %s'|format(messages[0].content) }}", "id-20250115 tel 0301234567"),
        ("{{ '%d %05.1f' % (1736899200, 2.5) }}", "1736899200 002.5"),
        ("{{ '{}'.format(1736899200) }}", "1736899200"),
        ("{{ '{}: {}'.format('user', messages[0].content) }}", "user: tel 0301234567"),
        ("{{ messages|map(attribute='content')|map('length')|sum }}", "1400"),
        ("{{ ('x' ~ '</think>y' * 99999).rsplit('</think>', 1)[-1].strip('\n ') }}", "y"),
        ("{{ messages|map(attribute='a.b.c', default='z')|join|length }}", "100"),
        ("{{ none|map('upper')|list|length }}", "0"),
        ("{{ messages|selectattr('content', 'ne', 'a, b. ' * 99)|list|length }}", "100"),
        ("{{ messages|rejectattr('content', 'eq', 'a, b. ' * 99)|list|length }}", "100"),
        ("{{ messages|map(attribute='content')|map('replace', 'tel', 'a, b. ' * 99)|first|length }}", "605"),
        ("{{ messages|map(attribute='name', default='a, b. ' * 99)|first|length }}", "594"),
        ("{{ messages|map(attribute='content')|join('a, b. ' * 99)|length }}", "60206"),
        ("{{ messages|groupby('name', 'a, b. ' * 99)|length }}", "1"),
    ],
)
def test_what_is_long_only_in_its_numbers_or_takes_time_in_proportion_is_rendered(source, made):
    assert ChatTemplate(source, {}).render([{"role": "user", "content": "tel 0301234567"}] * 100, None, {}) == made


def test_a_template_that_went_too_far_is_told_of_for_a_quarter_of_an_hour(monkeypatch):
    now = 1000.0
    monkeypatch.setattr("gateway.prompt.render.template.monotonic", lambda: now)
    template = ChatTemplate("{{ messages[0].content * (9 if messages|length > 1 else 10 ** 9) }}", {})
    with pytest.raises(TemplateError):
        template.render(CHAT, None, {})
    assert "more than a conversation of this size may take" in template.exceeds
    now += 899
    assert template.render(CHAT * 2, None, {}) == "hi" * 9
    assert "more than a conversation of this size may take" in template.exceeds, (
        "one good chat does not mend the others"
    )
    now += 2
    assert not template.exceeds
