"""Templates run on stand-ins: what is compiled is right, what can't be followed is not compiled."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prompt.render.clock import Clock
from gateway.prompt.render.renderer import Compiled
from gateway.prompt.render.shape import describe
from gateway.prompt.render.trace import answered
from gateway.prompt.tokens.prefixes import fits

from ..reference import environment

VARIABLES = {"add_generation_prompt": True}
TEXTS = st.one_of(
    st.sampled_from(
        ["", " ", "x", "  x\n", "</t>", "a</t>b</t>", "A", "aXb", "X", "1", '"', "é\n", "<s>", "\ufdd00\ufdd1"]
    ),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
)

# What templates in the wild do to a text, each in a loop over messages.
FOLLOWED = {
    "print": "{{ m.content }}",
    "item": "{{ m['content'] }}",
    "plus": "{{ 'a' + m.content + 'b' }}",
    "concat": "{{ 'a' ~ m.content ~ 1 }}",
    "trim": "{{ m.content | trim }}",
    "trim of a sum": "{{ (' ' + m.content + ' ') | trim }}",
    "strip method": "{{ m.content.strip() }}{{ m.content.lstrip('\\n') }}",
    "if empty": "{% if m.content %}[{{ m.content }}]{% else %}nothing{% endif %}",
    "or": "{{ m.content or 'none' }}",
    "contains": "{% if '</t>' in m.content %}{{ m.content.split('</t>')[-1] }}{% else %}{{ m.content }}{% endif %}",
    "not contains": "{% if 'X' not in m.content %}{{ m.content }}{% endif %}",
    "split": "{{ m.content.split('</t>')[0].rstrip('\\n').split('X')[-1].lstrip('\\n') }}",
    "startswith": "{% if m.content.startswith('a') and m.content.endswith('b') %}1{% endif %}{{ m.content }}",
    "length": "{{ m.content | length }}",
    "length test": "{% if m.content|length > 2 %}long{% endif %}",
    "equal": "{% if m.content == 'x' %}is x{% endif %}{% if m.content != 'x' %}is not{% endif %}",
    "compare": "{% if m.content < 'm' %}early{% endif %}",
    "equal to another": "{% if m.content == messages[0].content %}same{% endif %}",
    "list of": "{% if m.content in ['x', 'A'] %}listed{% endif %}",
    "upper": "{{ m.content | upper }}{{ m.content.lower() }}{{ m.content | capitalize }}",
    "replace": "{{ m.content | replace('X', '--') }}{{ m.content.replace('a', '') }}",
    "slice": "{{ m.content[1:] }}{{ m.content[:-1] }}",
    "set": "{% set c = m.content %}{% if c is string %}{{ c }}{% endif %}",
    "set block": "{% set c %} {{ m.content }}\n{% endset %}{{ c | trim }}{{ c | length }}",
    "macro": "{% macro f(x, y=1) %} {{ x }} {% endmacro %}{{ f(m.content) | trim }}{{ f(y=2, x=m.content) }}",
    "caller": "{% macro g() %}<{{ caller() }}>{% endmacro %}{% call g() %}{{ m.content }}{% endcall %}",
    "namespace": "{% set ns = namespace(t='') %}{% set ns.t = ns.t + m.content %}{{ ns.t }}{{ ns.t | trim }}",
    "join": "{{ [m.content, 'q', m.content] | join(', ') }}{{ '-'.join([m.content, m.role]) }}",
    "json": "{{ m.content | tojson }}",
    "json of the message": "{{ m | tojson }}{{ {'t': m.content, 'n': [1, m.content]} | tojson }}",
    "filters over messages": "{{ messages | map(attribute='content') | join('|') }}{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content }}",
    "tests": "{% if m.content is defined and m.content is not none and m.content is string and m.content is iterable %}{{ m.content }}{% endif %}",
    "default": "{{ m.content | default('d') }}{{ m.nothing | default(m.content) }}{{ m.content | default('e', true) }}",
    "date": "{{ strftime_now('%Y') }}{{ m.content }}",
    "string filter": "{{ '\"c\": ' + m.content | string + ', ' }}",
    "get": "{{ m.get('content', '') }}",
    "generation": "{% generation %}{{ m.content }}{% endgeneration %}",
    "break": "{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}",
    "items": "{% for k, v in m.items() %}{{ k }}={{ v }};{% endfor %}",
    "find": "{{ m.content.find('X') }}{{ m.content.count('X') }}",
    "reverse": "{{ m.content | reverse }}{{ m.content[::-1] }}",
    "first character": "{% if m.content %}{{ m.content[0] }}{% endif %}",
}
# What they do to a content that is a list of parts, which is how those that loop over it get every text.
IN_PARTS = {
    "iterable": "{% if m.content is string %}{{ m.content }}{% elif m.content is iterable and m.content is not mapping %}"
    "{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% else %}{{ raise_exception('?') }}{% endif %}",
    "sequence": "{% if m.content is sequence and m.content is not string %}{% for p in m.content %}{{ p['text'] }}{% endfor %}{% endif %}",
    "iterable object": "{% for p in m.content %}{% if p is iterable and p is mapping %}{{ p.text }}{% endif %}{% endfor %}",
    "macro": "{% macro visible(c) %}{% if c is string %}{{ c }}{% elif c is iterable %}{% for p in c %}{% if p is mapping and p.type == 'text' %}"
    "{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}{% set c = visible(m.content) %}"
    "{% if '</t>' in c %}{% set c = c.split('</t>')[-1].lstrip() %}{% endif %}{% if c.strip() %}{{ c.strip() }}{% endif %}",
    "printed as a list": "{{ m.content }}{{ m.content | string }}{{ [m.content, {'p': m.content[0]}] ~ '' }}",
    "trimmed as a list": "{{ m.content | trim }}{{ m.content | trim('[]{}') }}",
    "a list in upper case": "{{ m.content | upper }}{{ m.content | lower }}{{ m.content | capitalize }}",
    "set, then a call": "{% for p in m.content %}{% set t = p.text %}{{ t.strip() }}{{ m.get('name', 'x') }}{% endfor %}",
}
# What reads a text's characters where it can't be seen.
LOST = {
    "loop": "{% for c in m.content %}{{ c }}.{% endfor %}",
    "percent": "{{ '%s!' % m.content }}",
    "percent of many": "{{ '%s %s' % (m.content, 1) }}",
    "format": "{{ '{}!'.format(m.content) }}{{ '{0}'.format(m.content) }}",
    "in a text": "{% if m.content in 'xyz' %}yes{% endif %}",
    "key": "{{ {'x': 1}[m.content] }}",
    "key of a literal": "{{ {m.content: 1} | tojson }}",
    "number": "{{ m.content | int }}",
    "list": "{{ m.content | list }}",
    "escape": "{{ m.content | e }}",
    "wordcount": "{{ m.content | wordcount }}",
    "argument": "{{ 'aXb'.replace('X', m.content) }}",
    "strip by": "{{ 'aXb'.strip(m.content) }}",
    "ascii json": "{{ m.content | tojson(ensure_ascii=true) }}",
    "pprint": "{{ m | pprint }}",
    "times": "{{ m.content * 2 }}",
    "ordering of two": "{% if m.content < messages[0].content %}a{% endif %}",
    "random": "{{ [1, 2] | random }}",
    "groups": "{% for g, _ in messages | groupby('content') %}{{ g }}{% endfor %}",
}


def looped(body: str) -> str:
    return (
        "{% for m in messages %}<s>{{ m.role }}:" + body + "{% endfor %}{% if add_generation_prompt %}<s>a{% endif %}"
    )


def talk(*texts):
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]


def in_parts(*texts):
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in talk(*texts)]


def plan_of(compiled, messages):
    shape, slots = describe(messages)
    return compiled._compiler.plan(shape, messages, slots, None, VARIABLES), slots


def filled(plan, slots) -> str | None:
    """The plan's text, or None when it is not for these slots."""
    if not fits(plan, slots):
        return None
    out = []
    for segment in plan.segments:
        text = segment.text(slots)
        if not all(answered(question, (text,)) for question in segment.questions):
            return None
        out.append(segment.before + text + segment.after)
    return "".join(out)


CASES = {**{name: (body, talk) for name, body in FOLLOWED.items()},
         **{f"{name} in parts": (body, in_parts) for name, body in IN_PARTS.items()}}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@given(texts=st.lists(st.tuples(TEXTS, TEXTS, TEXTS), min_size=2, max_size=4))
@settings(max_examples=15)
def test_a_plan_says_what_jinja_says(name, texts):
    """A plan learnt on one conversation, filled with another, is either refused or right; and it fits some others: one
    that only ever fitted its own texts would be right and useless."""
    body, conversation = CASES[name]
    source = looped(body)
    compiled = Compiled(source, {}, ["<s>"])
    assert not compiled.why_not
    plain = environment().from_string(source)
    plan, slots = plan_of(compiled, conversation(*texts[0]))
    assert filled(plan, slots) == plain.render(messages=conversation(*texts[0]), **VARIABLES)
    for others in texts[1:]:
        text = filled(plan, list(others))
        assert text is None or text == plain.render(messages=conversation(*others), **VARIABLES)
    plan, _ = plan_of(compiled, conversation("bcd", "def", "ghi"))
    assert filled(plan, ["cde", "fgh", "ijk"]) is not None


@pytest.mark.parametrize("name", LOST)
def test_what_cannot_be_followed_is_not_compiled(name):
    compiled = Compiled(looped(LOST[name]), {}, ["<s>"])
    if not compiled.why_not:
        with pytest.raises(Exception):  # noqa: B017, whatever it is, no plan comes of it
            plan_of(compiled, talk("xy", "b"))


def test_segments_end_before_the_first_cut_after_a_text():
    compiled = Compiled("{% for m in messages %}<s>{{ m.content }}</s>\n{% endfor %}<s>a", {}, ["<s>", "</s>"])
    plan, slots = plan_of(compiled, talk("x", "y"))
    assert [s.before + s.text(slots) + s.after for s in plan.segments] == ["<s>x", "</s>\n<s>y", "</s>\n<s>a"]
    assert plan.literals[0] != plan.literals[1]


def test_objects_in_calls_are_dumped_and_printed():
    body = (
        "{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}{{ c.function.name }}{{ a | tojson }}"
        "{{ c | tojson }}{{ a }}{{ [a] }}{{ {'a': a} | string }}{{ (a, 1) }}{{ [a] ~ '' }}{{ c }}{{ c | upper }}"
        "{% if a is mapping and a is not string %}!{% endif %}{% endfor %}"
    )
    compiled = Compiled(looped(body), {}, ["<s>"])
    plain = environment().from_string(looped(body))

    def called(name, arguments):
        call = {"id": "1", "function": {"arguments": arguments, "name": name}, "type": "function"}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]

    plan, _ = plan_of(compiled, called("f", {"a": 1}))
    for name, arguments in (
        ("f", {"a": 1}),
        ("f", {"b": "it's"}),
        ('g"', {"b": 'x"é', "c": [None, {"d": 1.5}]}),
        ("", {}),
    ):
        messages = called(name, arguments)
        assert filled(plan, describe(messages)[1]) in (None, plain.render(messages=messages, **VARIABLES))
    assert filled(plan, describe(called("g", {"b": "x"}))[1]) is not None


def test_the_real_date_is_asked_for_each_time():
    clock = Clock(lambda: 0)
    compiled = Compiled("{{ strftime_now('%d %b') }}<s>{{ messages[0].content }}", {}, ["<s>"], clock=clock)
    plan, slots = plan_of(compiled, talk("x"))
    assert fits(plan, slots)
    clock.now = lambda: 86400
    assert not fits(plan, slots)


def test_shapes_tell_apart_all_that_is_not_text():
    plain = {"role": "user", "content": "x"}
    contents = (["x"], [{"type": "text", "text": "x"}], [{"type": "other", "text": "x"}])
    messages = [
        *(plain, {**plain, "role": "assistant"}, {**plain, "name": "n"}, {"name": "n", **plain}),
        *({**plain, "content": content} for content in contents),
        *({**plain, "n": value} for value in (1, True, 1.0, 0.0, -0.0, None)),
    ]
    shapes = [describe([message])[0] for message in messages]
    assert len(set(map(repr, shapes))) == len(shapes) == len(set(shapes))
    assert describe([plain])[0] == describe([{**plain, "content": "y"}])[0]


def test_a_shape_is_compiled_when_it_has_come_five_times_and_kept_while_it_is_used(monkeypatch):
    monkeypatch.setattr("gateway.prompt.render.renderer.PLANS_BYTES", 100_000)
    compiled = Compiled(looped("{{ m.content }}"), {}, ["<s>"])
    messages = talk("x")
    shape, slots = describe(messages)
    for seen in range(5):
        assert compiled.plans(shape) == (), seen
        compiled.learn(shape, messages, slots, None, VARIABLES)

    def others(kind):
        for i in range(120):
            for _ in range(5):
                compiled.learn((shape, kind, i), messages, slots, None, VARIABLES)
            assert len(compiled.plans((shape, kind, i))) == 1
            yield

    for _ in others("while it is used"):
        assert len(compiled.plans(shape)) == 1
    for _ in others("while it is not"):
        pass
    assert compiled.plans(shape) == ()


def test_what_shapes_leave_behind_is_bounded_in_bytes(monkeypatch):
    budget = 400_000
    monkeypatch.setattr("gateway.prompt.render.renderer.PLANS_BYTES", budget)
    compiled = Compiled(looped("{{ m.content }}") + "{{ tools | tojson }}", {}, ["<s>"])
    messages = talk("x")
    shape, slots = describe(messages)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for i in range(400):
            tools = [{"type": "function", "function": {"name": "f" * 4000, "description": str(i)}}]
            for _ in range(5 if i % 2 else 1):
                compiled.learn((shape, (str(i) * 1000,)), messages, slots, tools, VARIABLES)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert compiled.plans((shape, ("399" * 1000,))), "the last one is there"
    assert budget / 4 < after - before < 2 * budget


def test_a_shape_too_large_to_keep_is_not_kept():
    compiled = Compiled(looped("{{ m.content }}"), {}, ["<s>"])
    for _ in range(10):
        compiled.learn(("user", "x" * 1_000_000), talk("x"), ["x"], None, VARIABLES)
    assert compiled.plans(("user", "x" * 1_000_000)) == () and len(compiled._known) == 0


def test_a_shape_has_so_many_ways_and_no_more():
    compiled = Compiled(looped("{{ m.content | length }}"), {}, ["<s>"])
    shape = ("user",)
    for length in range(10):
        for _ in range(5):
            compiled.learn(shape, talk("x" * length), ["x" * length], None, VARIABLES)
    assert len(compiled.plans(shape)) == 6
    lost = Compiled(looped("{% for c in m.content %}{{ c }}{% endfor %}"), {}, ["<s>"])
    for _ in range(5):
        lost.learn(shape, talk("x"), ["x"], None, VARIABLES)
    assert [filled(plan, ["x"]) for plan in lost.plans(shape)] == [None]
