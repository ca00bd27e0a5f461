"""How many JSON schemas of a collection are served, how long a refusal takes, and whether invalid JSON is refused.

    python -m quire.loadtest.studies schemas FOLDER [--per-set 32] [--seed 20261126]

FOLDER is a copy of `data` or `maskbench/data` of JSONSchemaBench (github.com/guidance-ai/jsonschemabench), or of any
collection in their formats: FOLDER/SET/NAME.json with a schema each, or FOLDER/NAME.json with `schema` and `tests`
({"valid": BOOL, "data": JSON}).  From each set, or from all files of FOLDER, --per-set files are drawn.

Prints one line of JSON:

    schemas, accepted, reference   number of schemas, of those that are served, of those that llguidance itself compiles
    by_set                         set -> [schemas, accepted, reference]
    reasons                        reason of a refusal, without its path -> number; the ten most frequent
    slowest_accepted_ms, slowest_refused_ms   CPU time of the thread that compiles
    invalid, invalid_refused       invalid instances of served schemas, and those that the grammar refuses
    valid, valid_written           valid instances, and those that the grammar can write with their order of keys
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from quire.service.grammar.grammar import BOUNDS, Constraint, byte_tokenizer, compile_grammar
from quire.service.grammar.grammar_errors import NotServed


def drawn(folder: Path, per_set: int, seed: int) -> dict[str, list[Path]]:
    """Return set -> files, sorted and drawn with one seed."""
    dice, sets = random.Random(seed), dict[str, list[Path]]()
    for path in sorted(folder.rglob("*.json")):
        sets.setdefault(str(path.parent.relative_to(folder)), []).append(path)
    return {name: dice.sample(paths, min(per_set, len(paths))) for name, paths in sets.items()}


def read(path: Path) -> tuple[Any, list[dict[str, Any]]]:
    """Return a file's schema and its instances."""
    found = json.loads(path.read_bytes())
    if isinstance(found, dict) and "schema" in found and isinstance(found.get("tests"), list):
        return found["schema"], found["tests"]
    return found, []


def allows(grammar: str, value: Any) -> bool:
    """Return whether a grammar can write a value as JSON."""
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=BOUNDS)
    tokens = [*json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")]
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def compiled(schema: Any) -> tuple[str, str, float]:
    """Return (grammar, "", CPU milliseconds) of a schema that is served, else ("", reason, CPU milliseconds)."""
    started = time.thread_time()
    try:
        grammar, reason = compile_grammar(Constraint("schema", "json", schema)).grammar, ""
    except NotServed as error:
        grammar, reason = "", str(error).rpartition(": ")[2][:80]
    return grammar, reason, (time.thread_time() - started) * 1000


def compiles(schema: Any) -> bool:
    """Return whether llguidance itself compiles a schema."""
    try:
        return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    except ValueError:
        return False


def measured(sets: dict[str, list[Path]]) -> dict[str, Any]:
    """Compile every schema, and match the instances of those that are served."""
    by_set, reasons, counts = dict[str, list[int]](), Counter[str](), Counter[str]()
    slowest = {True: 0.0, False: 0.0}
    for name, paths in sets.items():
        for path in paths:
            schema, instances = read(path)
            grammar, reason, cpu_ms = compiled(schema)
            slowest[bool(grammar)] = max(slowest[bool(grammar)], cpu_ms)
            row = by_set.setdefault(name, [0, 0, 0])
            by_set[name] = [row[0] + 1, row[1] + bool(grammar), row[2] + compiles(schema)]
            if not grammar:
                reasons[reason] += 1
                continue
            for instance in instances:
                kind, said = "valid" if instance["valid"] else "invalid", allows(grammar, instance["data"])
                counts[kind] += 1
                counts["valid_written" if instance["valid"] else "invalid_refused"] += said == instance["valid"]
    totals = [sum(column) for column in zip(*by_set.values(), strict=True)]
    return {
        **dict(zip(("schemas", "accepted", "reference"), totals, strict=False)),
        "by_set": by_set,
        "reasons": dict(reasons.most_common(10)),
        "slowest_accepted_ms": round(slowest[True], 1),
        "slowest_refused_ms": round(slowest[False], 1),
        **{key: counts[key] for key in ("invalid", "invalid_refused", "valid", "valid_written")},
    }


def main(words: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of JSON schemas")
    parser.add_argument("--per-set", type=int, default=32, help="schemas to draw from each set")
    parser.add_argument("--seed", type=int, default=20261126, help="seed of the draw")
    asked = parser.parse_args(words)
    sets = drawn(asked.folder, asked.per_set, asked.seed)
    if not sets:
        parser.error(f"{asked.folder}: no file NAME.json")
    print(json.dumps(measured(sets)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
