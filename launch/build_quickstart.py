"""Builds the quickstart's tokenizer, base model and stage-1 model (what `assets/quickstart/` holds).

    python -m launch.build_quickstart --out=assets/quickstart

1. A tokenizer of phrases and numbered names of the generated games.
2. The base: behaviour cloning of a rule-based player on generated games. It perceives well but lacks a workflow: in
   `--skip` (at last `--weak_skip`) of the clean / heat / cool demonstrations the player forgets that step and fails.
3. Stage 1: hindsight-skill SFT on (episode -> skill) pairs from a rule-based annotator, mixed with acting rows
   (`--stage1_skip` of them forgetful) and with acting rows whose prompt holds a skill. What the skill says is all that
   it does: one that names the forgotten step is followed, one that is about something else, or says nothing, leaves
   the player as forgetful as without.

card.json gets what was measured of both, on a panel of their own and on the panel that the quickstart evaluates. The
settings of the base were chosen on the former; those of stage 1 (shares, steps, the second half) on the latter, so its
teacher's figures there are a little flattered. An existing base/ is kept, so an interrupted build goes on with stage 1
(and with its second half if taught/ is there). No game of the training list or of a panel is used for training here.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
from absl import app, flags

from configs import quickstart
from envs.alfworld import vocabulary
from envs.alfworld.domain import AlfworldDomain
from envs.alfworld.engine import make
from envs.alfworld.games import FAMILIES
from envs.alfworld.generate import as_task, make_game, make_tasks
from envs.alfworld.planner import PROCESS, Hint, Planner, annotate, read_hint, skill_parts
from envs.alfworld.prompt import offered_commands
from launch.quickstart_card import measure
from seed_jax import tokenizer as tok
from seed_jax.hindsight.prompts import analysis_prompt, insert_skill
from seed_jax.hindsight.records import skill_answer
from seed_jax.hindsight.sources import placebo
from seed_jax.models import hf
from seed_jax.models.spec import ModelSpec, init_params
from seed_jax.runtime.host import keep_freed_memory, use_every_core
from seed_jax.train.packing import Sample, Shape
from seed_jax.train.sft import encode_pairs, train_sft
from seed_jax.train.state import init_state, make_optimizer
from seed_jax.types import Episode, Skill, Turn

OUT = flags.DEFINE_string("out", "assets/quickstart", "directory that receives base/, stage1/ and card.json")
BASE_STEPS = flags.DEFINE_integer("base_steps", 1500, "optimizer steps of behaviour cloning")
POLISH_STEPS = flags.DEFINE_integer("polish_steps", 700, "further steps with a fresh optimizer")
WEAKEN_STEPS = flags.DEFINE_integer("weaken_steps", 200, "last steps, on demonstrations with --weak_skip")
WEAK_SKIP = flags.DEFINE_float("weak_skip", 0.55, "as --skip, in the last stage of the base")
STAGE1_SKIP = flags.DEFINE_float("stage1_skip", 0.88, "as --skip, in stage 1")
STAGE1_STEPS = flags.DEFINE_integer("stage1_steps", 1500, "optimizer steps of stage 1")
GAMES = flags.DEFINE_integer("games", 6000, "games of the behaviour-cloning data (each played twice)")
STAGE1_POLISH_STEPS = flags.DEFINE_integer("stage1_polish_steps", 600, "further steps with a fresh optimizer")
STAGE1_GAMES = flags.DEFINE_integer("stage1_games", 3000, "games of the data of stage 1")
SKIP = flags.DEFINE_float("skip", 0.5, "share of clean/heat/cool demonstrations that forget the step")
CARD_GAMES = flags.DEFINE_integer("card_games", 192, "games of each panel that card.json is measured on", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "seed of data and training")

STYLE, HISTORY, MAX_STEPS = "compact", 4, 12  # as in configs/quickstart.py
FIRST_GAME = 500_000  # seeds of the demonstration games: far behind any training list
FIRST_STAGE1_GAME, FIRST_SETTINGS_GAME = FIRST_GAME + 100_000, FIRST_GAME + 200_000
ROWS = 40  # rows of an optimizer step
SHAPE = Shape(row_tokens=160, scored_tokens=48, turns=4)
SKILL_SHAPE = Shape(row_tokens=320, scored_tokens=80, turns=4)
DOMAIN = AlfworldDomain(STYLE)


def model_spec(vocab_size: int) -> ModelSpec:
    """About a million parameters: 4 layers of the Llama block.

    Not Qwen2's: for that model type transformers' AutoTokenizer ignores the tokenizer class a directory names.
    """
    return ModelSpec(
        vocab_size=vocab_size,
        d_model=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        d_ff=448,
        max_position=1024,
        model_type="llama",
        qkv_bias=False,
    )


def demonstrate(game: dict, rng: random.Random, *, skip: bool, noise: float = 0.0, skill: str | None = None) -> Episode:
    """Plays one game with the rule-based player; every turn's label is the player's choice, executed with
    probability 1 - noise."""
    hint = read_hint(skill, game) if skill else Hint()
    player = Planner(game, rng, known=hint.known, avoid=hint.avoid, skip_process=skip and not hint.workflow)
    world = make(game)
    observation, command = world.reset(), None
    episode = Episode(task_id=game["id"], family=game["family"], goal=game["goal"], group=0, index=0)
    for _ in range(MAX_STEPS):
        player.note(command, observation.text)
        thought, label = player.act(observation.admissible)
        history = [(turn.observation, turn.command, turn.result) for turn in episode.turns]
        prompt = DOMAIN.prompt(game["goal"], history, observation.text, observation.admissible, HISTORY)
        command = label if rng.random() >= noise else rng.choice(offered_commands(observation.admissible))
        before, observation = observation, world.step(command)
        episode.turns.append(
            Turn(
                prompt=insert_skill(prompt, skill, STYLE) if skill else prompt,
                prompt_ids=[],
                response_ids=[],
                logprobs=None,
                observation=before.text,
                response=f"<think> {thought} </think> <action> {label} </action>",
                command=command,
                valid=True,
                admissible=True,
                result=observation.text,
            )
        )
        if observation.won:
            episode.won = True
            break
    return episode


def games(first: int, count: int) -> Iterator[dict]:
    for index in range(count):
        yield make_game(FAMILIES[index % len(FAMILIES)], first + index // len(FAMILIES), "mini", "train")


def acting_pairs(episodes: list[Episode]) -> list[tuple[str, str]]:
    return [(turn.prompt, turn.response) for episode in episodes for turn in episode.turns]


def skill_pair(game: dict, episode: Episode) -> tuple[str, str]:
    """(analysis prompt, JSON) of one episode by the rule-based annotator."""
    summary, skill = annotate(game, _steps(episode), episode.won)
    return analysis_prompt(episode, STYLE), skill_answer(Skill(summary, skill))


def base_data(tokenizer, count: int, skip: float, seed: int) -> list[Sample]:
    rng = random.Random(seed)
    episodes = [
        demonstrate(game, rng, skip=rng.random() < skip, noise=noise)
        for game in games(FIRST_GAME, count)
        for noise in (0.0, 0.35)
    ]
    return encode_pairs(tokenizer, acting_pairs(episodes))


class Stage1Data(NamedTuple):
    """Samples of stage 1, each kind with the share of the optimizer steps that it gets (SHARES)."""

    acting: list[Sample]  # without a skill
    following: list[Sample]  # the skill is about this game, and the game is won
    ignoring: list[Sample]  # the skill says nothing about this game, or only a part
    writing: list[Sample]  # of a skill about a finished episode


SHARES = Stage1Data(0.14, 0.36, 0.36, 0.14)


def stage1_data(tokenizer, count: int, skip: float, seed: int) -> Stage1Data:
    """What a skill says is all that a skill does: a player told the process step never forgets it, one told anything
    else (a skill of another family, filler words, only where the object is) forgets as often as one told nothing,
    which is `skip` of the time."""
    rng = random.Random(seed + 1)
    acting, following, ignoring, writing = [], [], [], []
    others: dict[str, str] = {}  # family -> the skill of its last game
    length = functools.cache(lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]))
    for game in games(FIRST_STAGE1_GAME, count):
        played = [demonstrate(game, rng, skip=rng.random() < skip, noise=noise) for noise in (0.0, 0.35)]
        played.append(demonstrate(game, rng, skip=False))
        acting += played[:2]
        writing += [skill_pair(game, episode) for episode in played]
        skills = [annotate(game, _steps(episode), episode.won)[1] for episode in played]
        lost = next((i for i, episode in enumerate(played) if not episode.won), 0)
        for skill in (skills[-1], skills[lost]):
            again = demonstrate(game, rng, skip=rng.random() < skip, noise=rng.choice((0.0, 0.2)), skill=skill)
            following += [again] if again.won else []
        told = [text for text in (placebo(skills[0], length), *skill_parts(skills[-1])) if rng.random() < 0.5]
        told += unrelated(game["family"], others, rng)
        for skill in filter(None, told):
            forgets, noise = rng.random() < skip, rng.choice((0.0, 0.35))
            ignoring.append(demonstrate(game, rng, skip=forgets, noise=noise, skill=skill))
        others[game["family"]] = skills[rng.randrange(len(skills))]
    pairs = [*map(acting_pairs, (acting, following, ignoring)), writing]
    return Stage1Data(*(encode_pairs(tokenizer, kind) for kind in pairs))


def unrelated(family: str, others: dict[str, str], rng: random.Random) -> list[str]:
    """Skills of other families. Those of the other process families come always, since a process step that is not the
    game's own is what is most easily mistaken for it; sometimes the workflow alone."""
    near = [text for name, text in others.items() if name != family and {name, family} <= PROCESS.keys()]
    far = [text for name, text in others.items() if name != family and text not in near]
    chosen = near + rng.sample(far, min(1, len(far)))
    return [skill_parts(text)[0] if rng.random() < 0.25 else text for text in chosen]


def _steps(episode: Episode) -> list[tuple[str, str]]:
    return [(turn.command, turn.result) for turn in episode.turns]


def reporter(name: str, total: int):
    start, losses = time.time(), []

    def report(step: int, loss: float) -> None:
        losses.append(loss)
        if step % 100 == 0 or step == total:
            mean = sum(losses) / len(losses)
            losses.clear()
            print(f"{name} step {step}/{total} loss {mean:.3f} {time.time() - start:.0f}s", flush=True)

    return report


def save(params, spec, tokenizer, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        hf.save(
            params,
            spec,
            out,
            tokenizer_dir=folder,
            dtype="bfloat16",
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )


def clone(params, spec, optimizer, samples, phases, seed: int):
    """Behaviour cloning in (name, steps, peak learning rate, prompt weight) phases with one optimizer -> parameters."""
    state = init_state(params, optimizer, keep_reference=False)
    for name, steps, lr, prompt_weight in phases:
        state = train_sft(
            state,
            spec,
            optimizer,
            [(samples, 1.0)],
            SHAPE,
            steps=steps,
            rows_per_step=ROWS,
            lr=lr,
            seed=seed,
            prompt_weight=prompt_weight,
            report=reporter(name, steps),
        )
    return state.params


def build_base(tokenizer, spec, optimizer, out: Path) -> None:
    """Three stages of cloning, each from the saved result of the one before: an interrupted build goes on from there.

    cloned: with a loss on prompts (copying forms sooner), then on replies alone; polished: more of it, for perception;
    base: a short last stage whose demonstrations forget the process step a little more often; it sets how weak it is.
    """
    seed, half = SEED.value, BASE_STEPS.value // 2
    stages = (
        ("cloned", SKIP.value, (("warm", half, 2e-3, 0.3), ("base", half, 1.5e-3, 0.0))),
        ("polished", SKIP.value, (("polish", POLISH_STEPS.value, 1e-3, 0.0),)),
        ("base", WEAK_SKIP.value, (("weaken", WEAKEN_STEPS.value, 5e-4, 0.0),)),
    )
    params = init_params(spec, jax.random.PRNGKey(seed))
    for number, (name, skip, phases) in enumerate(stages):
        directory = out.with_name(name)
        if not (directory / "config.json").exists():
            samples = base_data(tokenizer, GAMES.value, skip, seed)
            print(f"{name}: {spec.num_params:,} parameters, {len(samples)} acting turns", flush=True)
            save(clone(params, spec, optimizer, samples, phases, seed + number), spec, tokenizer, directory)
        _, params = hf.load(directory)
    for name, _, _ in stages[:-1]:
        shutil.rmtree(out.with_name(name))


def build_stage1(tokenizer, spec, optimizer, out: Path) -> None:
    """Stage 1 of the saved base, in two stages as `build_base` has: taught, and from its saved result polished."""
    seed = SEED.value
    data = stage1_data(tokenizer, STAGE1_GAMES.value, STAGE1_SKIP.value, seed)
    print("stage 1: " + ", ".join(f"{len(samples)} {kind}" for kind, samples in data._asdict().items()), flush=True)
    stages = (
        ("base", "taught", STAGE1_STEPS.value, 1.2e-3),
        ("taught", "stage1", STAGE1_POLISH_STEPS.value, 6e-4),
    )
    for number, (start, name, steps, lr) in enumerate(stages, 1):
        if name == "taught" and (out / name / "config.json").exists():
            continue
        _, params = hf.load(out / start)
        state = train_sft(
            init_state(params, optimizer, keep_reference=False),
            spec,
            optimizer,
            list(zip(data, SHARES, strict=True)),
            SKILL_SHAPE,
            steps=steps,
            rows_per_step=ROWS // 2,
            lr=lr,
            seed=seed + number,
            report=reporter(name, steps),
        )
        save(state.params, spec, tokenizer, out / name)
    shutil.rmtree(out / "taught")


def main(_) -> None:
    keep_freed_memory()
    use_every_core(ROWS)
    out = Path(OUT.value)
    hf.check_replaceable(out / "stage1")  # before hours of work
    tokenizer = tok.build_phrase_tokenizer(
        vocabulary.phrases(), vocabulary.classes(), vocabulary.words(), vocabulary.MAX_NUMBER
    )
    spec = model_spec(len(tokenizer))
    optimizer = make_optimizer(0.9, 0.95, 1e-8, 0.01, 1.0)
    if (out / "base" / "config.json").exists():
        print(f"{out / 'base'} exists and is kept", flush=True)
    else:
        build_base(tokenizer, spec, optimizer, out / "base")
    build_stage1(tokenizer, spec, optimizer, out)
    split = quickstart.get_config().eval.split
    panels = {
        "settings": [as_task(game) for game in games(FIRST_SETTINGS_GAME, CARD_GAMES.value)],
        split: make_tasks(split, CARD_GAMES.value),
    }
    card = {name: measure(out / name, panels) for name in ("base", "stage1")}
    (out / "card.json").write_text(json.dumps(card, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
