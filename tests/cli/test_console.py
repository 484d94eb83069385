"""What is printed is complete without a terminal, and slow things announce themselves."""

from __future__ import annotations

import time

import pytest

from flashgen.tools.cli import console


def test_long_values_are_never_cut(capsys):
    text = "x" * 3000
    console.print_rows([("name", text), ("other", "y")])
    out = capsys.readouterr().out
    assert out == f"name   {text}\nother  y\n"


def test_brackets_are_text_and_not_markup(capsys):
    console.print_rows([("keep", "[bold]q >= k[/bold]")])
    console.say("[red]plain")
    out = capsys.readouterr().out
    assert "[bold]q >= k[/bold]" in out
    assert "[red]plain" in out


def test_nothing_is_announced_that_is_quick(capsys):
    with console.busy("adding"):
        pass
    assert capsys.readouterr().err == ""


def test_slow_things_are_announced_on_stderr(capsys, monkeypatch):
    monkeypatch.setattr(console, "_SLOW_SECONDS", 0.01)
    with console.busy("multiplying"):
        time.sleep(0.2)
    captured = capsys.readouterr()
    assert captured.err == "multiplying ...\n"
    assert captured.out == ""


def test_an_error_inside_slow_work_comes_through():
    with pytest.raises(ZeroDivisionError), console.busy("dividing"):
        _ = 1 // 0


@pytest.mark.parametrize(
    ("value", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.2e-6, "4.2 us"), (0.0, "0 us")]
)
def test_times_have_a_fitting_unit(value, text):
    assert console.seconds(value) == text
