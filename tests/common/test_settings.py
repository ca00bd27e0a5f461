"""The settings loader: precedence, types, and one-line errors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from quire.engine.common import settings
from quire.engine.common.removed_options import REMOVED, REMOVED_VALUES
from quire.engine.config import EngineConfig
from quire.service.cli import BOTH, ServeConfig, split
from quire.service.config import GatewayConfig


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str = ""
    """What to serve."""
    max_seqs: Annotated[int, Meta(ge=1, le=4096)] = 256
    """Sequences at once."""
    threshold: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Fraction of the pool."""
    block_size: Literal[8, 16] = 16
    """Tokens."""
    cache: bool = True
    """Reuse."""
    keys: list[str] = []
    """Who may."""


def parse(*argv: str, environ: dict[str, str] | None = None) -> Config:
    return settings.parse(Config, argv, environ or {}, positional="model")


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    file = tmp_path / "quire.toml"
    file.write_text("max_seqs = 1\nthreshold = 0.1\nblock_size = 8\n")
    environ = {"QUIRE_MAX_SEQS": "2", "QUIRE_THRESHOLD": "0.2", "QUIRE_OF_ANOTHER_PROCESS": "x"}
    got = parse("--config", str(file), "--max-seqs", "3", environ=environ)
    assert got == Config(max_seqs=3, threshold=0.2, block_size=8)


def test_every_kind_of_flag() -> None:
    got = parse("org/name", "--no-cache", "--keys", "a, b", "--block-size=8", "--max-seqs", "1", "--max-seqs", "7")
    assert got == Config(model="org/name", cache=False, keys=["a", "b"], block_size=8, max_seqs=7)
    assert parse("--cache", environ={"QUIRE_CACHE": "false"}).cache is True


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--max-seqs", "0"], "--max-seqs is '0'; must be a whole number, >= 1, <= 4096"),
        (["--max-seqs", "many"], "--max-seqs is 'many'; must be a whole number, >= 1, <= 4096"),
        (["--threshold", "nan"], "--threshold is 'nan'; must be a number, > 0, <= 1"),
        (["--block-size", "9"], "--block-size is '9'; must be one of 8 16"),
        (["--cache=maybe"], "--cache is 'maybe'; must be true or false"),
        (["--max-seq", "1"], "--max-seq is not an option; did you mean --max-seqs?"),
        (["--max-seqs"], "--max-seqs needs a value"),
        (["--max-seqs", "--cache"], "--max-seqs needs a value"),
        (["a", "b"], "'b' is one argument too many"),
        (["--config", "/nowhere.toml"], "--config /nowhere.toml: No such file or directory"),
    ],
)
def test_a_bad_setting_is_one_line_and_status_2(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        settings.load(Config, argv, {}, prog="quire test", positional="model")
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"quire test: {says}\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense = 1", "nonsense is not a setting"),
        ("max_seqs = '3'", "max_seqs is '3'"),
        ("[a]\nb=1", r"\[a\] is not a table"),
        ("[engin]\nb=1", r"\[engin\] is not a table; did you mean engine\?"),
        ("engine = 3", r"engine is 3; must be a table, \[engine\]"),
        ("=", "--config"),
        (f"max_seqs = {'1' * 5000}", "--config"),  # beyond Python's limits of digits and of nesting
        (f"max_seqs = {'[' * 5000}", "--config"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (file := tmp_path / "quire.toml").write_text(text)
    with pytest.raises(settings.SettingsError, match=says):
        parse("--config", str(file))


@pytest.mark.parametrize("cls", [EngineConfig, GatewayConfig, ServeConfig])
def test_help_names_every_option(cls: type[msgspec.Struct]) -> None:
    text = settings.describe(cls)
    for field in cls.__struct_fields__:
        assert field.replace("_", "-") in text


SECTIONED = """
model = "both"
max_seqs = 2
[engine]
max_seqs = 3
cache = false
[gateway]
port = 9
"""


def test_a_file_has_a_table_for_each_program(tmp_path: Path) -> None:
    (file := tmp_path / "quire.toml").write_text(SECTIONED)
    got = settings.parse(Config, ["--config", str(file)], {"QUIRE_CACHE": "true"}, table="engine")
    assert got == Config(model="both", max_seqs=3, cache=True)  # a table beats the keys for all, the environment both
    assert settings.parse(Config, ["--config", str(file)], {}, table="serve") == Config(model="both", max_seqs=2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[engine]\nmax_seq = 1", r"\[engine\] max_seq is not a setting; did you mean max_seqs\?"),
        ("[engine]\nmax_seqs = 0", r"\[engine\] max_seqs is 0; must be a whole number, >= 1"),
        ("port = 9", r"port is not a setting; what is for one program stands in its table"),
        ("[engine]\ntheirs = 1", r"\[engine\] theirs is not a setting"),  # shared, but not in a table
    ],
)
def test_a_table_is_as_strict_as_the_rest(tmp_path: Path, text: str, says: str) -> None:
    (file := tmp_path / "quire.toml").write_text(f"theirs = 1\n{text}")
    with pytest.raises(settings.SettingsError, match=says):
        settings.parse(Config, ["--config", str(file)], {}, table="engine", shared={"theirs"})


def test_a_variable_of_no_program_is_named() -> None:
    programs: list[type[msgspec.Struct]] = [EngineConfig, GatewayConfig, ServeConfig]
    fine = {"QUIRE_MAX_SEQS": "1", "QUIRE_PORT": "1", "QUIRE_GATEWAYS": "2", "PATH": "/bin"}
    assert settings.unknown_variable(fine, programs) is None
    says = settings.unknown_variable({**fine, "QUIRE_MAX_SEQ": "1"}, programs)
    assert says == "QUIRE_MAX_SEQ is not an option; did you mean QUIRE_MAX_SEQS?"


@pytest.mark.parametrize("field", REMOVED)
def test_a_removed_option_is_refused_with_what_replaced_it(field: str, tmp_path: Path) -> None:
    flag, variable = settings.flag_of(field), f"QUIRE_{field.upper()}"
    for cls in (ServeConfig, GatewayConfig, EngineConfig):
        assert field not in cls.__struct_fields__
    for word in (flag, f"{flag}=1", flag.replace("--", "--no-", 1)):
        with pytest.raises(settings.SettingsError) as refused:
            parse(word)
        assert str(refused.value) == f"{word.split('=')[0]} is not an option any more: {REMOVED[field]}"
    file = tmp_path / "quire.toml"
    file.write_text(f"{field} = 1\n")
    with pytest.raises(settings.SettingsError, match=f"{field} is not a setting any more: ") as refused:
        parse("--config", str(file))
    assert REMOVED[field] in str(refused.value)
    says = settings.unknown_variable({variable: "1"}, (ServeConfig, EngineConfig))
    assert says == f"{variable} is not an option any more: {REMOVED[field]}"
    with pytest.raises(settings.SettingsError, match=f"{flag} is not an option any more: "):
        settings.parse(EngineConfig, split([flag, "1"])[2], {})


@pytest.mark.parametrize(("field", "value"), REMOVED_VALUES)
def test_a_removed_value_is_refused_with_what_replaced_it(field: str, value: str, tmp_path: Path) -> None:
    instead, flag, variable = REMOVED_VALUES[field, value], settings.flag_of(field), f"QUIRE_{field.upper()}"
    (file := tmp_path / "quire.toml").write_text(f'[engine]\n{field} = "{value}"\n')
    for words, environ, source in (
        ([f"{flag}={value}"], {}, flag),
        ([], {variable: value}, variable),
        (["--config", str(file)], {}, f"{file}: [engine] {field}"),
    ):
        with pytest.raises(settings.SettingsError) as refused:
            settings.parse(EngineConfig, words, environ, table="engine")
        assert str(refused.value).startswith(f"{source} is {value!r}; must be one of ")
        assert str(refused.value).endswith(f": {instead}")


def test_serve_sorts_its_words() -> None:
    words = ["org/m", "--port", "9", "--gateways=2", "--max-seqs", "4", "--no-prefix-cache", "--served-name", "x"]
    own, gateway, engine = split(words)
    assert own == ["--gateways=2"]
    assert gateway == ["--model", "org/m", "--port", "9", "--served-name", "x"]
    assert engine == ["--model", "org/m", "--max-seqs", "4", "--no-prefix-cache", "--served-name", "x"]
    assert split(["--config", "f", "--port=1"]) == (["--config", "f"], ["--config", "f", "--port=1"], ["--config", "f"])


def test_what_engine_and_gateway_share_goes_to_both() -> None:
    shared = set(EngineConfig.__struct_fields__) & set(GatewayConfig.__struct_fields__)
    # The Redis address is the supervisor's to choose, and each process has a port of its own.
    assert shared - {"redis_url", "metrics_port"} == BOTH
