"""A tiny model with the quickstart's tokenizer, and a config to train it: shared by the tests of sampler, update and
loop."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import tempfile
from collections import Counter
from pathlib import Path

import jax
import numpy as np

from configs import quickstart
from envs.alfworld import engine, games, generate, planner, vocabulary
from envs.alfworld.domain import AlfworldDomain
from envs.base import Obs
from envs.ezpoints.domain import EzpointsDomain
from envs.sokoban.domain import GOAL as SOKOBAN_GOAL
from envs.sokoban.domain import SokobanDomain
from envs.sokoban.room import ACTIONS
from seed_jax import sharding
from seed_jax import tokenizer as tok
from seed_jax.models import hf
from seed_jax.models.spec import ModelSpec, init_params
from seed_jax.models.vision_spec import VisionSpec
from seed_jax.runtime.logging import is_measured, prepare_workdir, read_jsonl
from seed_jax.train.packing import Sample, Shape
from seed_jax.train.sft import train_sft
from seed_jax.train.state import init_state, make_optimizer
from seed_jax.types import Skill, Written

GRAMMAR = """grammar :: {{"task": [{{"rhs": "Your task is to: {goal}."}}]}};
action PutObject {{
    template :: "move {{o}} to {{r}}";
}}
"""
IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
VISION_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def tokenizer():
    return tok.build_phrase_tokenizer(
        vocabulary.phrases(), vocabulary.classes(), vocabulary.words(), vocabulary.MAX_NUMBER
    )


def spec(vocab_size: int) -> ModelSpec:
    return ModelSpec(
        vocab_size=vocab_size, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48,
        max_position=512, model_type="llama", qkv_bias=False,
    )  # fmt: skip


def demonstrations(count: int = 60) -> list[Sample]:
    """Turns of the rule-based player."""
    domain, rng, pairs = AlfworldDomain("compact"), random.Random(0), []
    for task in generate.make_tasks("unseen", count):
        player, world, history, command = planner.Planner(task.source, rng), engine.make(task.source), [], None
        observation = world.reset()
        while len(history) < 6 and not observation.won:
            player.note(command, observation.text)
            thought, command = player.act(observation.admissible)
            prompt = domain.prompt(task.goal, history, observation.text, observation.admissible, 4)
            pairs.append((prompt, f"<think> {thought} </think> <action> {command} </action>"))
            before, observation = observation, world.step(command)
            history.append((before.text, command, observation.text))
    prompts = tok.encode_prompts(tokenizer(), [prompt for prompt, _ in pairs])
    return [Sample(p, tok.encode_response(tokenizer(), reply)) for p, (_, reply) in zip(prompts, pairs, strict=True)]


def imitate(params, shape: ModelSpec, steps: int):
    """A few seconds of behaviour cloning: the form of a reply is learned, the game is not."""
    optimizer = make_optimizer(0.9, 0.95, 1e-8, 0.0, 1.0)
    state = train_sft(
        init_state(params, optimizer, keep_reference=False), shape, optimizer, [(demonstrations(), 1.0)],
        Shape(160, 48, 4), steps=steps, rows_per_step=8, lr=2e-2, seed=0,
    )  # fmt: skip
    return state.params


def save_model(out: Path, seed: int = 0, steps: int = 0) -> Path:
    """A tiny model as a Hugging Face directory: random, or after `steps` steps of imitation."""
    words = tokenizer()
    shape = spec(len(words))
    params = init_params(shape, jax.random.PRNGKey(seed))
    if steps:
        params = imitate(params, shape, steps)
    with tempfile.TemporaryDirectory() as folder:
        words.save_pretrained(folder)
        hf.save(
            params,
            shape,
            out,
            tokenizer_dir=folder,
            eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id,
        )
    return out


@functools.cache
def vision_tokenizer():
    """Byte pairs of the prompts of the games with pictures, in the class that Qwen2.5-VL has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    domains = (SokobanDomain("released", "image"), EzpointsDomain("released", "image"))
    texts = [domain.prompt(SOKOBAN_GOAL, [], "Cards: A, K\nFormula: 1 +", [], 0) for domain in domains]
    texts += [f"<think> {word} </think> <action>{word}</action>" for word in (*ACTIONS, *map(str, range(13)))]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1500, initial_alphabet=letters, show_progress=False))
    learned = json.loads(core.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learned["vocab"], merges=[tuple(pair) for pair in learned["merges"]], eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", *IMAGE_TOKENS], chat_template=VISION_TEMPLATE,
    )  # fmt: skip


def vision_spec(vocab_size: int, **changes) -> ModelSpec:
    """Qwen2.5-VL at toy size; a layer of its tower attends in windows, the other over the whole image."""
    start, image, end = vision_tokenizer().convert_tokens_to_ids(list(IMAGE_TOKENS))
    tower = VisionSpec(
        depth=2, d_model=24, num_heads=2, d_ff=20, full_layers=(1,),
        start_token=start, image_token=image, end_token=end,
    )  # fmt: skip
    sizes = {
        "vocab_size": vocab_size, "d_model": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "d_ff": 48, "rope_theta": 1e6, "max_position": 4096, "model_type": "qwen2_5_vl", "rope_sections": (1, 1, 2),
        "vision": tower,
    }  # fmt: skip
    return ModelSpec(**sizes | changes)


def vision_model(out: Path, seed: int = 0, **changes) -> Path:
    """A tiny random Qwen2.5-VL as a Hugging Face directory; changes: fields of its ModelSpec."""
    words = vision_tokenizer()
    shape = vision_spec(len(words), **changes)
    params = jax.jit(init_params, static_argnums=0)(shape, jax.random.PRNGKey(seed))
    with tempfile.TemporaryDirectory() as folder:
        words.save_pretrained(folder)
        return hf.save(
            params, shape, out, tokenizer_dir=folder, eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id
        )


def config(model_dir: Path, method: str = "seed"):
    """The quickstart's config at toy size."""
    config = quickstart.get_config(method)
    config.model.init = str(model_dir)
    config.iterations = 2
    config.env.engine = "native"  # `write_games` leaves out the texts by which "auto" chooses
    config.env.max_steps = 3
    config.env.train_tasks = 12
    config.rollout.tasks = 3
    config.rollout.group = 2
    config.rollout.batch = 16
    config.rollout.prompt_bucket = 160  # one padded length, so that the sampler compiles once
    config.pack.rows_per_micro = 8
    config.mesh.fsdp = -1
    config.eval.games = 6
    config.eval.every = 0
    config.eval.teacher_games = 0
    config.checkpoint.every = 1
    config.log.diagnostics_episodes = 6
    config.log.trajectories_panel = 2
    config.hindsight.min_coverage_iterations = 0
    return config


@contextlib.contextmanager
def one_device(cache: Path):
    """Runs take one of the test's virtual devices; programs compiled for one run serve the others, from `cache`."""
    settings = {"jax_compilation_cache_dir": str(cache), "jax_persistent_cache_min_compile_time_secs": 0.2}
    before, make_mesh = {name: getattr(jax.config, name) for name in settings}, sharding.make_mesh
    for name, value in settings.items():
        jax.config.update(name, value)
    sharding.make_mesh = functools.partial(make_mesh, jax.devices()[:1])
    try:
        yield
    finally:
        sharding.make_mesh = make_mesh
        for name, value in before.items():
            jax.config.update(name, value)


def write_skills(sampler, tokenizer, episodes, hindsight, style, iteration, begun=None) -> Counter:
    """In place of `analyze`: two episodes of three get a skill, and one for their first turn, the others none."""
    if begun is not None:
        begun.finish()  # what the tiny model says about its episodes is not used
    counts = Counter()
    for episode in episodes:
        if not episode.error:
            counts["analyzed"] += 1
            episode.skill_error = "too_short"
            if episode.index % 3:
                text = f"search for {episode.goal.split()[-1]} first ."
                episode.skill, episode.skill_error = Skill("failure", text, ((0, f"now {text}"),)), ""
                answer = tok.encode_response(tokenizer, text)
                prompt = tok.encode_prompts(tokenizer, [f"your task is to: {episode.goal}"])[0]
                episode.written = Written(prompt, answer, np.full(len(answer), -1.0, np.float32))
                counts["parsed"] += 1
    counts["rejected/too_short"] = counts["analyzed"] - counts["parsed"]
    return counts


class EasyPool:
    """Every game is won by reaching any place: a reward that a tiny model gets now and then."""

    def __init__(self, pool):
        self.pool = pool

    def open(self, slots, tasks):
        return self.pool.open(slots, tasks)

    def prefetch(self, slots, tasks):
        self.pool.prefetch(slots, tasks)

    def step(self, slots, commands):
        return [
            result._replace(won=True, done=True, reward=10.0)
            if isinstance(result, Obs) and result.text.startswith("You arrive at")
            else result
            for result in self.pool.step(slots, commands)
        ]


def easy(setup):
    return setup._replace(world=setup.world._replace(pool=EasyPool(setup.world.pool)))


def run(config, workdir: Path, change_setup=easy) -> dict:
    """What the launcher does, in this process: starts the run, or resumes it if the workdir already holds it."""
    from launch.environment import open_environment
    from seed_jax.train import loop

    resuming = prepare_workdir(workdir, config)
    with open_environment(config) as setup:
        return loop.train(config, change_setup(setup), workdir, resuming=resuming)


def outcome(workdir: Path, iteration: int) -> dict:
    """Everything a run leaves that must not depend on interruptions: compared with ==, so bit by bit.

    `checksums` covers weights, moments and counters of the checkpoint of the last iteration.
    """
    without_time = lambda record: {k: v for k, v in record.items() if not is_measured(k)}  # noqa: E731
    meta = json.loads((workdir / "checkpoints" / str(iteration) / "meta" / "metadata").read_text())
    return {
        "weights": (workdir / "export" / "model.safetensors").read_bytes(),
        "checksums": meta["leaf_checksums"],
        "metrics": [without_time(record) for record in read_jsonl(workdir / "metrics.jsonl")],
        "evaluations": read_jsonl(workdir / "evaluations.jsonl"),
        "episodes": read_jsonl(workdir / "episodes.jsonl"),
        "outcomes": read_jsonl(workdir / "outcomes.jsonl"),
        "trajectories": [read_jsonl(workdir / f"trajectories{which}.jsonl") for which in ("", "_panel")],
    }


def write_games(root: Path, split: str, count: int) -> list[Path]:
    """Generated games as files in the official layout (with the parts that the native engine reads)."""
    paths = []
    for task in generate.make_tasks(split, count):
        game = task.source
        path = root / games.SPLIT_DIRS[split] / game["directory"] / f"trial_{game['seed']:07d}" / games.GAME_FILE
        path.parent.mkdir(parents=True)
        content = {
            "pddl_domain": "(define (domain alfred))",
            "grammar": GRAMMAR.format(goal=game["goal"]),
            "pddl_problem": game["pddl_problem"],
            "solvable": True,
            "walkthrough": game["walkthrough"],
        }
        path.write_text(json.dumps(content))
        paths.append(path)
    return paths
