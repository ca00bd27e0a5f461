"""Write the pages that are derived from the config structs and the table of limits.

These are the page of all options, the options' part of the chart's schema, and the limits in the page of the API.

    python .ci/options.py          brings docs/options.md, docs/api.md and helm/values.schema.json up to date

A test fails while they are not (tests/test_options.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from quire.engine.common import settings  # noqa: E402
from quire.engine.config import EngineConfig  # noqa: E402
from quire.service.cli import ServeConfig  # noqa: E402
from quire.service.common import limits  # noqa: E402
from quire.service.config import GatewayConfig  # noqa: E402
from quire.service.terminal.options import BenchConfig, ChatConfig, TopConfig  # noqa: E402

PAGE = ROOT / "docs" / "options.md"
API = ROOT / "docs" / "api.md"
BEGIN, END = "<!-- limits: written by .ci/options.py -->", "<!-- end of limits -->"  # around the generated part of API
SCHEMA = ROOT / "helm" / "values.schema.json"
CLIENT = "The only environment variable that it reads is the API key's."
SECTIONS: dict[str, tuple[type[msgspec.Struct], str]] = {
    "serve": (
        ServeConfig,
        "`quire serve`: Redis, an engine and gateways on one machine. It takes the options of both, too.",
    ),
    "gateway": (GatewayConfig, "`quire gateway`: HTTP in, server-sent events out."),
    "engine": (EngineConfig, "`quire engine`: the model."),
    "top": (TopConfig, f"`quire top URL`: a running server's state, in a terminal. {CLIENT}"),
    "chat": (ChatConfig, f"`quire chat URL`: talk to a model of any OpenAI-compatible server. {CLIENT}"),
    "bench": (BenchConfig, f"`quire bench URL`: a small load on any OpenAI-compatible server. {CLIENT}"),
}
# Options that the chart sets itself, for one program or for both; in a values file they would contradict it.
CHARTS_OWN = {
    "gateway": {"host", "port", "uds", "drain_s", "gateway_id", "api_keys", "admin_keys", "tenants", "trace_prompts"},
    "engine": {"engine_id", "standby", "metrics_host", "metrics_port", "tensor_parallel"},
}
OF_BOTH = {"model", "served_name", "namespace", "redis_url", "log_format", "otlp_endpoint", "trace_sample"}
# The end of an option's name implies the unit of its value.
UNITS = {
    "_s": "seconds",
    "_seconds": "seconds",
    "_ms": "milliseconds",
    "_gib": "GiB",
    "_bytes": "bytes",
    "_entries": "entries",
    "_tokens": "tokens",
    "_len": "tokens",
    "_blocks": "KV blocks",
    "_seqs": "sequences",
    "_size": "tokens",
    "_chars": "characters",
    "_threshold": "fraction",
}
INTRO = """# Every option

Written by `python .ci/options.py` from the config structs; CI refuses a page that is not current.

A flag wins over the environment, the environment over the file of `--config`, and the file over the default. An option
`max_seqs` is the flag `--max-seqs 64`, the variable `QUIRE_MAX_SEQS=64` and the key `max_seqs = 64` of the file. A bool
is `--x` or `--no-x`. A list has commas between its entries; in the file it is a TOML list. An option that is unknown or
out of its limits stops the start with one line that names it. So does a variable `QUIRE_...` that is no option of any
program.

The file is TOML. Keys before the first table are read by every program that uses the file, so each program
must have these options. Options of one program are in its table:

```toml
model = "./llama"           # quire serve gives model, served_name and namespace to both
[serve]
gateways = 4
[gateway]
port = 9000
[engine]
max_model_len = 8192
```
"""


def page() -> str:
    """Returns docs/options.md."""
    parts = [INTRO]
    for name, (cls, about) in SECTIONS.items():
        parts.append(
            f"\n## {name}\n\n{about}\n\n| option | value | default | what it does, and why |\n|---|---|---|---|"
        )
        for option in settings.options(cls):
            value = ", ".join(filter(None, [unit(option), *option.limits]))
            cells = [f"`{option.flag}`", value, f"`{option.default}`", option.description]
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    parts.append(
        "\n## Limits of every input\n\n"
        "[api.md](api.md#limits) explains them. The defaults are a gateway's.\n\n" + limit_table()
    )
    return "\n".join(parts) + "\n"


def limit_table() -> str:
    """Returns every row of service/common/limits.py, with the defaults of a gateway."""
    head = "| input | what is counted | limit | option | refusal |\n|---|---|---|---|---|"
    rows = limits.rows(GatewayConfig())
    return "\n".join([head, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)])


def api() -> str:
    """Returns docs/api.md with today's limits; the rest of the page is written by hand."""
    before, rest = API.read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{BEGIN}\n{limit_table()}\n{END}{rest.split(END)[1]}"


def unit(option: settings.Option) -> str:
    """Returns the unit of a numeric option; "" where the option's name is what it counts."""
    if not any("number" in limit or limit.startswith("one of 8") for limit in option.limits):
        return ""
    return next((unit for end, unit in UNITS.items() if option.name.endswith(end)), "")


def schema() -> str:
    """Returns helm/values.schema.json with today's options under $defs; the rest is written by hand."""
    whole = json.loads(SCHEMA.read_text(encoding="utf-8"))
    for name, own in CHARTS_OWN.items():
        _, parts = msgspec.json.schema_components([SECTIONS[name][0]], ref_template="#/$defs/{name}")
        (described,) = parts.values()
        options: dict[str, Any] = {
            key: value for key, value in described["properties"].items() if key not in own | OF_BOTH
        }
        texts = settings.descriptions(SECTIONS[name][0])
        for key, option in options.items():
            del option["default"]  # the program has it; a values file need not repeat it
            options[key] = {"description": texts[key], **option}
        whole["$defs"][f"{name}Config"] = {
            "type": "object",
            "additionalProperties": False,
            "properties": options,
        }
    return json.dumps(whole, indent=2) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    API.write_text(api(), encoding="utf-8")
    SCHEMA.write_text(schema(), encoding="utf-8")
