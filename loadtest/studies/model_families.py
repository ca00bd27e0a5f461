"""Check on tiny checkpoints which model families of transformers are served; writes docs/models.md.

    python -m quire.loadtest.studies models         every causal family; takes about ten minutes on two cores
        --only llama,gpt2       some of them; prints the table and writes no page
        --tensor-parallel 2     texts of two ranks against those of one; writes no page

For each family it makes a tiny checkpoint with random float32 weights, and compares greedy outputs of three prompts on
a CPU with `transformers.generate`: in one batch with unchunked prefill, again with their prefixes cached, and in chunks
of 7 tokens without a cache.  A family is equal only if all nine outputs are, token for token.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import logging
import random
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForTextToWaveform,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

from quire.engine.config import EngineConfig
from quire.engine.executor import loading
from quire.engine.executor.errors import ModelLoadError, UnsupportedModel, one_line
from quire.engine.executor.models import served_config, text_tower
from quire.engine.executor.models.progress_bars import no_bars
from quire.engine.llm import LLM
from quire.engine.wire.messages import Sampling
from quire.loadtest.studies.tiny_checkpoints import MORE_LAYERS, VOCAB, make_checkpoint

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
PROMPTS = (5, 33, 61)  # tokens
OUTPUT = 12  # tokens
GREEDY = Sampling(temperature=0.0, ignore_eos=True)
CHUNK = 7  # tokens
EQUAL, UNCACHED, REFUSED, DIFFERENT, FAILS, NOT_MADE = (
    "equal",
    "equal without their cache",
    "refused",
    "different",
    "fails",
    "not tried",
)
MEANING = {
    EQUAL: "all texts equal those of transformers, token for token",
    UNCACHED: "texts equal those of transformers' forward, with which its own generation with a cache disagrees",
    REFUSED: "refused at the start, with this line",
    DIFFERENT: "served, and some text differs: a bug",
    FAILS: "an error that is no refusal: a bug",
    NOT_MADE: "no tiny checkpoint could be made, or transformers cannot generate with it",
}

# Families whose config describes a complete audio model, from which the causal class cannot be built.
WHOLE_IS_AUDIO = {"musicgen", "musicgen_melody"}


class Verdict(msgspec.Struct, frozen=True):
    """The result for one model family."""

    family: str
    outcome: str  # a key of MEANING
    reason: str = ""


def families() -> list[str]:
    """Return the sorted model types for which transformers has a text-generating class, multimodal ones included."""
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)
    return sorted({config.model_type for mapping in mappings for config in mapping} | text_tower.TOWERS.keys())


def model_class(family: str) -> Any:
    """Return transformers' class for a family's models; for a multimodal family, the class of the complete model."""
    causal = family in {config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING}
    if family in text_tower.TOWERS or not causal:
        listens = family not in {config.model_type for config in MODEL_FOR_MULTIMODAL_LM_MAPPING}
        return AutoModelForSeq2SeqLM if listens else AutoModelForMultimodalLM
    return AutoModelForTextToWaveform if family in WHOLE_IS_AUDIO else AutoModelForCausalLM


def judge(family: str, directory: Path, ranks: int = 1) -> Verdict:
    """Create the family's tiny checkpoint in `directory`, and compare Quire's texts with those of transformers.

    With several ranks, compare their texts with those of one rank."""
    try:
        make_checkpoint(directory, family, model_class=model_class(family), **MORE_LAYERS.get(family, {}))
    except Exception as error:  # config and model classes raise arbitrary exceptions for unsuitable sizes
        reason = refusal_of_default(family)
        return Verdict(family, REFUSED, reason) if reason else Verdict(family, NOT_MADE, one_line(error))
    try:
        alone = our_texts(directory) if ranks > 1 else {}
        ours = our_texts(directory, tensor_parallel=ranks)
    except ModelLoadError as error:
        reason = refusal_of_default(family) or str(error).replace(str(directory), "checkpoint")
        return Verdict(family, REFUSED, reason)
    except Exception as error:
        return Verdict(family, FAILS, one_line(error))
    if ranks > 1:
        odd = [name for name, texts in ours.items() if texts != alone[name]]
        return Verdict(family, DIFFERENT, ", ".join(odd)) if odd else Verdict(family, EQUAL)
    try:
        wanted = own_texts(directory, model_class=model_class(family))
    except Exception as error:
        return Verdict(family, NOT_MADE, f"transformers.generate: {one_line(error)}")
    if all(texts != wanted and texts == ours["whole"] for texts in ours.values()):
        with contextlib.suppress(Exception):  # models that cannot run without a cache raise
            if ours["whole"] == own_texts(directory, use_cache=False, model_class=model_class(family)):
                differ = sum(own != our for own, our in zip(wanted, ours["whole"], strict=True))
                reason = f"with its cache, {differ} of {len(wanted)} texts of transformers.generate differ"
                return Verdict(family, UNCACHED, reason)
    if odd := [name for name, texts in ours.items() if texts != wanted]:
        return Verdict(family, DIFFERENT, ", ".join(odd))
    return Verdict(family, EQUAL)


def refusal_of_default(family: str) -> str:
    """Return why the family's default config is refused; "": it is not refused.

    This is the complete model's reason.  A tiny checkpoint of an encoder-decoder, for example, may contain only one of
    its two parts, which would be refused for another reason."""
    try:
        served_config.check_architecture(AutoConfig.for_model(family))
    except UnsupportedModel as error:
        return str(error)
    except Exception:  # config classes raise arbitrary exceptions
        return ""
    return ""


def prompts() -> list[list[int]]:
    """Return the prompts: random token ids with a fixed seed."""
    draw = random.Random(0)
    return [draw.choices(range(3, VOCAB), k=count) for count in PROMPTS]


def our_texts(directory: Path, **options: Any) -> dict[str, list[list[int]]]:
    """Return Quire's output tokens for all prompts, per way of computing them.  `options`: fields of EngineConfig.

    Raises ModelLoadError, RuntimeError."""
    settings = EngineConfig(model=str(directory), device="cpu", kv_blocks=128, max_seqs=8, threads=1, **options)
    chunked = msgspec.structs.replace(settings, chunk_tokens=CHUNK, prefix_cache=False)
    found = {}
    for config, names in ((settings, ("whole", "repeated")), (chunked, (f"in chunks of {CHUNK}",))):
        llm = LLM.over(config, loading.load(config))
        for name in names:
            outputs = [completion.outputs[0] for completion in llm.generate(prompts(), GREEDY, max_new_tokens=OUTPUT)]
            for output in outputs:
                if output.finish_reason == "error":
                    raise RuntimeError(output.message)
            found[name] = [output.token_ids for output in outputs]
        llm.close()
    return found


@torch.inference_mode()
def own_texts(
    directory: Path,
    *,
    use_cache: bool = True,
    warm: int = 0,
    model_class: Any = AutoModelForCausalLM,
    **config: Any,
) -> list[list[int]]:
    """Return transformers' output tokens for all prompts.

    config  changes of the model's config
    warm    length of a sequence computed before each prompt, because the rotary angles of some models depend on the
            longest sequence so far; 0: none
    """
    with no_bars():
        model = model_class.from_pretrained(directory, dtype=torch.float32, **config)
    texts = []
    for prompt in prompts():
        if warm:
            model(input_ids=torch.ones(1, warm, dtype=torch.int64), use_cache=False)
        ids = torch.tensor([prompt])
        if use_cache:
            mask = torch.ones_like(ids)
            ids = model.generate(ids, attention_mask=mask, max_new_tokens=OUTPUT, do_sample=False, eos_token_id=-1)
        while ids.shape[1] < len(prompt) + OUTPUT:
            following = model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(2)
            ids = torch.cat([ids, following], 1)
        texts.append(ids[0, len(prompt) :].tolist())
    return texts


def page(verdicts: list[Verdict]) -> str:
    """Return the text of docs/models.md."""
    counts = collections.Counter(verdict.outcome for verdict in verdicts)
    lines = [
        "# Model families",
        "",
        f"Made by `python -m quire.loadtest.studies models` with transformers {transformers.__version__} on a CPU.",
        "Every causal family gets a tiny checkpoint with random float32 weights. Three prompts are continued greedily:",
        f"unchunked in one batch, again with their prefixes cached, and in chunks of {CHUNK}. Do not edit this page.",
        "",
        "| outcome | families | meaning |",
        "|---|---|---|",
        *(f"| {outcome} | {counts[outcome]} | {meaning} |" for outcome, meaning in MEANING.items()),
        "",
        "## Equal",
        "",
        textwrap.fill(", ".join(f"`{verdict.family}`" for verdict in verdicts if verdict.outcome == EQUAL), 118),
    ]
    for outcome in (DIFFERENT, FAILS, UNCACHED, REFUSED, NOT_MADE):
        if counts[outcome]:
            lines += ["", f"## {outcome.capitalize()}", "", "| family | reason |", "|---|---|"]
            lines += [row(verdict) for verdict in verdicts if verdict.outcome == outcome]
    return "\n".join(lines) + "\n"


def row(verdict: Verdict) -> str:
    reason = verdict.reason.removeprefix(f"{verdict.family}: ").replace("|", "\\|")
    return f"| `{verdict.family}` | {reason if len(reason) <= 160 else reason[:157] + '...'} |"


def compare(names: list[str], ranks: int = 1) -> list[Verdict]:
    """Judge these families, one after another; print each outcome to stderr."""
    verdicts = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="quire-models-") as folder:
            verdicts.append(judge(name, Path(folder) / name, ranks))
        print(f"{name}: {verdicts[-1].outcome} {verdicts[-1].reason}".rstrip(), file=sys.stderr, flush=True)
        gc.collect()
    return verdicts


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m quire.loadtest.studies models", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", default="", help="families, separated by commas; the page is not written then")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="compare this many CPU ranks with one rank")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)  # more threads would only wait for each other in models of this size
    transformers.logging.set_verbosity_error()
    verdicts = compare(options.only.split(",") if options.only else families(), ranks := options.tensor_parallel)
    if ranks > 1:
        counts = collections.Counter(verdict.outcome for verdict in verdicts)
        print(f"{ranks} ranks:", ", ".join(f"{outcome} {count}" for outcome, count in counts.items()))
    elif options.only:
        print(page(verdicts))
    else:
        options.out.write_text(page(verdicts), encoding="utf-8")
    return int(any(verdict.outcome in (DIFFERENT, FAILS) for verdict in verdicts))
