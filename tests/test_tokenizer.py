"""The quickstart's tokenizer on its own texts, and what loading refuses."""

from __future__ import annotations

import json
import random

import pytest

from envs.alfworld.domain import AlfworldDomain
from envs.alfworld.engine import make
from envs.alfworld.generate import make_game, make_tasks
from envs.alfworld.planner import Planner, annotate
from envs.alfworld.prompt import offered_commands
from seed_jax import tokenizer as tok
from seed_jax.hindsight.prompts import insert_skill
from tests import tiny


@pytest.fixture(scope="module")
def words():
    return tiny.tokenizer()


def pieces(words, text: str) -> list[str]:
    return words.convert_ids_to_tokens(words(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("You arrive at shelf 1.", ["you arrive at", "shelf 1", "."]),
        ("On the shelf 1, you see a mug 2, and a desklamp 1.",
         ["on", "the", "shelf 1", ", you see a", "mug 2", ", and a", "desklamp 1", "."]),
        ("go to   countertop 6", ["go to", "countertop 6"]),
        ("countertop 7", ["countertop", "7"]),  # beyond the largest number that has a token
        ("shelf 12", ["shelf", "12"]),
        ("<think> search for mug . </think> <action> look </action>",
         ["<think>", "search for", "mug", ".", "</think>", "<action>", "look", "</action>"]),
        ("nowhere is a place in a cabinet", ["<unk>", "is", "a", "<unk>", "in", "a", "cabinet"]),
        ("<eos>", ["<eos>"]),
        ("", []),
    ],
)  # fmt: skip
def test_pieces(words, text, expected):
    assert pieces(words, text) == expected


def test_round_trip_up_to_white_space_and_case(words):
    skill = '{"episode_summary": "failure", "episode_skill": "mug is at shelf 1 . take it , then move it to desk 1 ."}'
    for text in (skill, "<think> search for second mug . </think> <action> take mug 2 from shelf 1 </action>"):
        ids = words(text, add_special_tokens=False)["input_ids"]
        decoded = tok.decode(words, ids)
        assert "".join(decoded.split()) == "".join(text.lower().split())
        assert words(decoded, add_special_tokens=False)["input_ids"] == ids
        assert json.loads(decoded) if text.startswith("{") else True


def test_responses_end_and_prompts_are_chats(words):
    ids = tok.encode_response(words, "<action> look </action>")
    assert ids[-1] == words.eos_token_id and tok.decode(words, ids) == "<action> look </action>"
    (prompt,) = tok.encode_prompts(words, ["now: look"])
    assert words.convert_ids_to_tokens(prompt) == ["<user>", "now:", "look", "<assistant>"]
    assert tok.encode_prompts(words, []) == []
    assert [len(p) for p in tok.encode_prompts(words, ["look", "look look"])] == [3, 4], "no padding"


def test_every_text_of_a_hundred_games_has_tokens_of_its_own(words):
    """Observations, the commands that the prompt offers, thoughts and skills: nothing is <unk>."""
    domain, rng, texts = AlfworldDomain("compact"), random.Random(0), []
    splits = [("train", 70), ("seen", 15), ("unseen", 15)]
    for game in [task.source for split, count in splits for task in make_tasks(split, count)]:
        player, world, steps = Planner(game, rng), make(game), []
        observation, command = world.reset(), None
        for _ in range(10):
            player.note(command, observation.text)
            thought, command = player.act(observation.admissible)
            if rng.random() < 0.4:
                command = rng.choice(offered_commands(observation.admissible))
            history = [("", c, o) for c, o in steps]
            prompt = domain.prompt(game["goal"], history, observation.text, observation.admissible, 4)
            texts += [f"<think> {thought} </think> <action> {command} </action>", *observation.admissible]
            observation = world.step(command)
            steps.append((command, observation.text))
            summary, skill = annotate(game, steps, observation.won)
            texts += [prompt, f'{{"episode_summary": "{summary}", "episode_skill": "{skill}"}}']
            texts.append(insert_skill(prompt, skill, "compact"))
            if observation.won:
                break
    texts = sorted(set(texts))
    encoded = words(texts, add_special_tokens=False)["input_ids"]
    unknown = [text for text, ids in zip(texts, encoded, strict=True) if words.unk_token_id in ids]
    assert unknown == []
    assert max(len(ids) for ids in encoded) < 200


def test_saved_and_loaded_by_transformers(words, tmp_path):
    from transformers import AutoTokenizer

    words.save_pretrained(tmp_path)
    for again in (AutoTokenizer.from_pretrained(tmp_path), tok.load_tokenizer(tmp_path)):
        text = make_game("pick_and_place_simple", 1)["goal"] + " . go to shelf 3 , you see nothing ."
        assert again(text, add_special_tokens=False)["input_ids"] == words(text, add_special_tokens=False)["input_ids"]
        assert tok.encode_prompts(again, [text]) == tok.encode_prompts(words, [text])
        assert (again.eos_token_id, again.pad_token_id) == (words.eos_token_id, words.pad_token_id)
        assert tok.decode(again, words(text)["input_ids"]) == tok.decode(words, words(text)["input_ids"])


def test_loading_says_what_is_missing(words, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no tokenizer \(tokenizer_config.json is missing\)"):
        tok.load_tokenizer(tmp_path)
    for field, message in (("eos_token", "no eos_token"), ("chat_template", "no chat template")):
        folder = tmp_path / field
        words.save_pretrained(folder)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config.pop(field, None)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        for name in ("chat_template.jinja", "special_tokens_map.json"):
            if field == "chat_template" or name != "chat_template.jinja":
                (folder / name).unlink(missing_ok=True)
        with pytest.raises(ValueError, match=message):
            tok.load_tokenizer(folder)


def test_vocabulary_has_no_duplicates_and_special_tokens_come_first(words):
    tokens = words.convert_ids_to_tokens(range(len(words)))
    assert tuple(tokens[:5]) == tok.SPECIAL and len(set(tokens)) == len(tokens)
