import pytest

from replicas.yaml_text import NotYaml, load


@pytest.mark.parametrize(
    "value, reason",
    [
        ("!!int ''", "'' is no int"),
        ("!!int _", "'_' is no int"),
        ("!!int x", "invalid literal for int"),
        (f"0x{'f' * 5000}", "Exceeds the limit"),
        (f"0b{'1' * 50_000}", "Exceeds the limit"),
        ("1" + ":0" * 5000, "Exceeds the limit"),
        ("!!float ''", "'' is no float"),
        ("!!bool maybe", "'maybe' is no bool"),
        ("!!timestamp soon", "'soon' is no timestamp"),
        ("2020-13-45", "month must be"),
        ("!!map x", "expected a mapping node, but found scalar"),
        ("!!map [a]", "expected a mapping node, but found sequence"),
        ("!!set [a]", "expected a mapping node, but found sequence"),
        ("{a: 1, a: 2}", "'a' is there twice"),
        ("!!python/object:os.system x", "could not determine a constructor"),
    ],
)
def test_a_value_that_cannot_be_made_is_refused_with_its_line(value, reason):
    with pytest.raises(NotYaml) as caught:
        load(f"first: 1\nsecond: {value}\n")
    assert caught.value.line == 2 and caught.value.reason.startswith(reason)
