"""The options of `python -m milestones serve`. Importing them needs no extra."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from typing import Any, cast

import pytest

from common import EngineConfig
from milestones.extras import extras, missing
from milestones.serving import serve
from milestones.serving.serve import add_options, described, from_options
from milestones.serving.server.settings import ServerSettings


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(["m5", *arguments])


def test_every_field_is_an_option() -> None:
    args = parse()
    assert from_options(EngineConfig, args) == EngineConfig()
    assert from_options(ServerSettings, args) == ServerSettings()
    for record in (EngineConfig, ServerSettings):
        assert described(record).keys() >= {field.name for field in fields(record)}
    assert ServerSettings().host == "127.0.0.1"


def test_options_are_read_with_their_types() -> None:
    args = parse("--max-num-seqs", "3", "--no-enable-overlap", "--emulated-forward-ms", "1.5",
                 "--schedule-policy", "lpm", "--num-pages", "9", "--port", "1")  # fmt: skip
    expected = replace(
        EngineConfig(), max_num_seqs=3, enable_overlap=False, emulated_forward_ms=1.5,
        schedule_policy="lpm", num_pages=9,
    )  # fmt: skip
    assert from_options(EngineConfig, args) == expected
    assert from_options(ServerSettings, args).port == 1


@pytest.mark.parametrize("wrong", ["--max-num-seqs=x", "--schedule-policy=best", "--nothing=1"])
def test_wrong_options_are_refused(wrong: str) -> None:
    with pytest.raises(SystemExit):
        parse(wrong)


@pytest.mark.parametrize("field", ["port", "max_body_bytes", "drain_timeout", "host"])
def test_wrong_settings_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        ServerSettings(**cast("dict[str, Any]", {field: -1}))


def test_help_shows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, EngineConfig)
    parser.print_help()
    shown = capsys.readouterr().out
    assert "--max-num-batched-tokens INT" in shown and "maximum number of tokens" in shown


def test_missing_packages_are_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("milestones.extras.is_installed", lambda name: name != "uvicorn")
    assert serve.main(parse()) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("uvicorn not installed: ") and line.endswith(
        "-m milestones extras serve installs what is missing"
    )


def test_a_complete_extra_has_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("milestones.extras.is_installed", lambda name: True)
    assert all(missing(name) is None for name in extras()) and "serve" in extras()


def test_a_milestone_that_does_not_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "missing", lambda name: None)
    args = parse()
    args.milestones = ["m9"]
    assert serve.main(args) == 2
    assert "no milestone 'm9'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "options", "said"),
    [
        (["m3", "m4", "m5"], [], "one engine or two"),
        (["m3", "m3_paged"], [], "two different"),
        (["m3", "m4"], ["--replicas", "2"], "--replicas"),
        (["m3", "m4"], ["--no-live-page"], "live page"),
    ],
)
def test_engines_that_are_not_served_together(
    names: list[str], options: list[str], said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(serve, "missing", lambda name: None)
    args = parse(*options)
    args.milestones = names
    assert serve.main(args) == 2
    assert said in " ".join(capsys.readouterr().out.split())


def test_two_engines_share_the_model_of_the_first() -> None:
    served = serve.open_engines(
        ["m3_paged", "speculative"], EngineConfig(model="tiny-llama", device="cpu")
    )
    first, second = served.values()
    assert first.loaded is second.loaded and first.owns_model and not second.owns_model
    second.close()
    first.close()
