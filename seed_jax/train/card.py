"""The model card of an export: model_card.md, filled with what the run knows. What it does not know is "not recorded".

Names come from configs and directories that others wrote: each is one line of text, whatever signs are in it, and can
end neither the header nor a cell nor a span of code.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seed_jax import config as config_lib
from seed_jax.models.spec import ModelSpec
from seed_jax.report.markup import visible

TEMPLATE = Path(__file__).with_name("model_card.md")
NOT_RECORDED = "not recorded"
FACTORS = (  # what a method is, in the order of the config; see _factors for what is left out
    "hindsight.source", "hindsight.control", "hindsight.granularity", "hindsight.placement", "hindsight.at_rollout",
    "adv.kind", "adv.stat", "adv.normalize", "adv.invalid_penalty", "adv.shape", "loss.kind", "loss.aggregation",
    "loss.rl_coef", "loss.kl_coef", "loss.entropy_coef", "loss.gen_coef", "distill.kind", "distill.gate",
    "distill.beta", "distill.coef", "distill.teacher", "distill.rows", "distill.schedule", "optim.lr",
)  # fmt: skip
_USE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("DIR"), AutoTokenizer.from_pretrained("DIR")
messages = [{{"role": "user", "content": "what the environment says"}}]
prompt = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True{thinking}
)
reply = model.generate(**prompt, max_new_tokens={reply_tokens}, do_sample=False)
print(tokenizer.decode(reply[0, prompt["input_ids"].shape[1] :]))"""
_USE_WITH_IMAGES = """\
from transformers import AutoModelForImageTextToText, AutoProcessor  # with Pillow and torchvision

model, processor = AutoModelForImageTextToText.from_pretrained("DIR"), AutoProcessor.from_pretrained("DIR")
content = [  # in the order of the environment's prompt
    {{"type": "text", "text": "what stands before the picture"}},
    {{"type": "image", "path": "picture.png"}},
    {{"type": "text", "text": "what stands behind it"}},
]
prompt = processor.apply_chat_template(
    [{{"role": "user", "content": content}}],
    add_generation_prompt=True, tokenize=True, return_tensors="pt", return_dict=True,
)
reply = model.generate(**prompt, max_new_tokens={reply_tokens}, do_sample=False)
print(processor.decode(reply[0, prompt["input_ids"].shape[1] :]))"""
_MARKS = re.compile(r"([\\`*_{}\[\]<>#|!&~])")  # signs of Markdown that mean something in the middle of a line


# -- names that others chose -------------------------------------------------------------------------------------------


def line(value: Any) -> str:
    """As one line, control characters as their code."""
    return " ".join(visible(str(value)).split())


def plain(value: Any) -> str:
    """As text of Markdown."""
    return _MARKS.sub(r"\\\1", line(value))


def code(value: Any) -> str:
    """As a span of code, also in a cell of a table."""
    text = line(value).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def header(spec: ModelSpec, base_id: str | None, *tags: str) -> str:
    """Lines of YAML as the Hugging Face Hub reads them; texts and lists in the form of JSON, which is YAML too."""
    task = "image-text-to-text" if spec.vision else "text-generation"
    fields: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": task}
    fields |= {"tags": [*tags, "seed-jax"], **({"base_model": line(base_id)} if base_id else {})}
    return "\n".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items())


def table(facts: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())])


def rate(record: Mapping[str, Any] | None) -> str:
    return f"{record['success_rate']:.3f} ± {record['standard_error']:.3f}" if record else NOT_RECORDED


# -- a policy ----------------------------------------------------------------------------------------------------------


def policy_card(
    spec: ModelSpec,
    config: Mapping[str, Any],
    record: Mapping[str, Any],
    evaluations: Sequence[Mapping[str, Any]],
    games: Mapping[str, Any] | None,
    dtype: str,
    base_id: str | None = None,
) -> str:
    """README.md of an exported policy.

    config: of the run; record: as seed_jax.json says it; evaluations: records of evaluations.jsonl; games: what
    games.json says, None = there is none. Of a base model in a local directory the card gives the last two names of
    the path, and no link to the hub.
    """
    flat, iteration = config_lib.flatten(config), record["iterations"]
    facts = {
        "base model": code(record["base_model"]),
        "method": f"{code(record['method'])}, {iteration} iteration{'s' * (iteration != 1)}",
        "factors": ", ".join(code(factor) for factor in _factors(flat)),
        "environment": f"{code(flat['env.name'])} ({plain(flat['env.prompt'])} prompt), at most "
        f"{flat['env.max_steps']} turns an episode",
        "training games": _games(flat, games, "train"),
        "evaluation games": _games(flat, games, "panel"),
        "episodes": f"{flat['rollout.tasks']} tasks x {flat['rollout.group']} episodes an iteration, at temperature "
        f"{flat['rollout.temperature']:g}",
        "seeds": f"training {flat['seed']}, evaluation {flat['eval.seed']}",
        "config hash": code(record["config_hash"]),
        "architecture": f"{code(spec.model_type)}, {spec.num_params:,} parameters, stored as {dtype}",
    }
    thinking = {"on": ", enable_thinking=True", "off": ", enable_thinking=False"}
    return string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        header=header(spec, base_id, "reinforcement-learning", *([] if spec.vision else ["text-agents"])),
        title=f"{plain(record['base_model'])} trained with {plain(record['method'])}",
        base=code(record["base_model"]),
        environment=code(flat["env.name"]),
        facts=table(facts),
        evaluation="\n".join(_evaluation(flat, iteration, evaluations)),
        skills=_skills(flat),
        prompt_tokens=flat["rollout.max_prompt_tokens"],
        reply_tokens=flat["rollout.max_response_tokens"],
        temperature=f"{flat['rollout.temperature']:g}",
        temperatures=" and ".join(f"{temperature:g}" for temperature in flat["eval.temperatures"]),
        use=use(spec, flat["rollout.max_response_tokens"], thinking.get(flat["rollout.thinking"], "")),
        seed=flat["seed"],
    )


def use(spec: ModelSpec, reply_tokens: int, thinking: str) -> str:
    """Lines of Python that ask the model for a reply; thinking: argument of the chat template, ", name=value" or ""."""
    return (_USE_WITH_IMAGES if spec.vision else _USE).format(reply_tokens=reply_tokens, thinking=thinking)


def _factors(flat: Mapping[str, Any]) -> list[str]:
    """"name=value"; of skills and of the teacher only whether there are any, if there are none."""
    unused = ["hindsight."] * (flat["hindsight.source"] == "none")
    unused += ["distill."] * (flat["distill.kind"] == "none" and flat["adv.shape"] == "none")
    said = [
        name for name in FACTORS
        if name in flat and (name.endswith((".source", ".kind")) or not name.startswith(tuple(unused)))
    ]  # fmt: skip
    return [f"{name}={flat[name]:g}" if isinstance(flat[name], float) else f"{name}={flat[name]}" for name in said]


def _games(flat: Mapping[str, Any], games: Mapping[str, Any] | None, part: str) -> str:
    where = flat["env.data"] if flat["env.data"] in ("generated", "official") else Path(flat["env.data"]).name
    split = "train" if part == "train" else flat["eval.split"]
    if games is None:
        return f"{code(where)}, split {code(split)}; hashes {NOT_RECORDED}"
    return f"{code(where)}, split {code(split)}, {games[part]['count']} games, sha256 {code(games[part]['sha256'])}"


def _evaluation(flat: Mapping[str, Any], iteration: int, evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    of = {(r["iteration"], (r["temperature"], bool(r.get("with_skills")))): r for r in evaluations}
    mine = {condition: record for (number, condition), record in of.items() if number == iteration}
    if not mine:
        return [f"These weights, those after iteration {iteration}, were not evaluated in the run."]
    lines = [
        f"Success on {next(iter(mine.values()))['games']} held-out games ({code(flat['eval.split'])}), ± one standard "
        "error:",
        "",
        "| temperature | before training | these weights | mean over task families |",
        "|---|---|---|---|",
    ]
    for (temperature, with_skills), record in sorted(mine.items()):
        named = f"{temperature:g}{', skills in the prompt' * with_skills}"
        before = rate(of.get((0, (temperature, with_skills))))
        lines.append(f"| {named} | {before} | {rate(record)} | {record['macro_success_rate']:.3f} |")
    return lines


def _skills(flat: Mapping[str, Any]) -> str:
    """What the prompts of the run say of skills at inference."""
    share, at_eval = flat["hindsight.at_rollout"], flat["hindsight.at_eval"]
    if share == 0 and at_eval == "no":
        text = "No skill is read at inference: neither a library nor an analyzer is needed."
        if again := flat["hindsight.second_attempts"]:
            text += f" In training {again:.0%} of the episodes were second attempts, with a skill in the prompt."
        return text
    return f"Skills stood in prompts of this run: `hindsight.at_rollout` = {share:g}, `hindsight.at_eval` = {at_eval}."
