"""Prompts with images: the sampler agrees with `score_tokens` and with transformers, whatever else is decoded."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seed_jax import images as images_lib
from seed_jax import tokenizer as tok
from seed_jax.models import hf
from seed_jax.models.logprobs import scored_logprobs
from seed_jax.sampler import rooms
from seed_jax.sampler.engine import Sampler
from seed_jax.sampler.rooms import make_room
from seed_jax.sampler.sampling import sample, sample_without
from seed_jax.train.packing import Sample, Shape, pack_rows
from seed_jax.types import SamplingParams
from tests import tiny

WORDS = tiny.vision_tokenizer()
WORDS.vision = tiny.vision_spec(len(WORDS)).vision
SIZE = (56, 84)  # 2 x 3 cells
STEPS = 4
LONGEST = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(directory, spec, weights) of a tiny random model whose tokens differ in probability."""
    out = tiny.vision_model(tmp_path_factory.mktemp("vision") / "tiny", seed=1)
    spec, params = hf.load(out)
    params = {**params, "embed": 8.0 * params["embed"]}
    louder = hf.save(params, spec, out.parent / "louder", tokenizer_dir=out, eos_token_id=WORDS.eos_token_id)
    return louder, spec, params


@pytest.fixture(scope="module")
def sampler(model):
    """With pieces of 32 tokens, so that images lie across them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooms, "PIECE", 32)
        _, spec, params = model
        places = [make_room("short", 4, 48, 12, 32, STEPS), make_room("long", 2, LONGEST, 12, 32, STEPS)]
        made = Sampler(spec, WORDS.eos_token_id, seed=3, prompt_bucket=32, rooms=places, steps=STEPS)
        made.load(params)
        yield made


def pictures(count: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 256, (count, *SIZE, 3), np.uint8))


def prompt(images, words: str = "move up") -> list[int]:
    """Images between words."""
    text = "".join(f"step {number}: {images_lib.PLACEHOLDER} " for number in range(len(images))) + words
    return tok.encode_prompts(WORDS, [text], images=[images])[0]


def requests() -> list[tuple[list[int], SamplingParams, tuple, tuple[np.ndarray, ...]]]:
    """One image or many, in pieces or in one; text between them."""
    made = []
    for number, count in enumerate((1, 5, 0, 3, 1, 0, 2)):
        shown = pictures(count, seed=number)
        params = [SamplingParams(9), SamplingParams(7, 0.7, top_k=50, top_p=0.9), SamplingParams(11, 0.0)][number % 3]
        made.append((prompt(shown, "left " * number), params, (5, number, 0), shown))
    return made


def answers(sampler, asked) -> list:
    handles = [sampler.submit(p, params, sampler.key(path), shown) for p, params, path, shown in asked]
    done = {}
    while sampler.pending:
        done |= dict(sampler.step())
    return [done[handle] for handle in handles]


def test_log_probs_are_those_of_the_model(model, sampler):
    _, spec, params = model
    asked = requests()
    lengths = [len(p) for p, *_ in asked]
    assert max(lengths) > 64, "more than two pieces"
    done = answers(sampler, asked)
    shape = Shape(LONGEST + 12, 12, 1, images=5, image_size=SIZE, vision=spec.vision)
    samples = [Sample(p, reply.tokens, images=shown) for (p, _, _, shown), reply in zip(asked, done, strict=True)]
    rows, mask = pack_rows([[sample] for sample in samples], shape)
    places = rows.tokens, rows.segments, rows.positions, rows.targets
    wanted = jax.jit(lambda *x: scored_logprobs(params, spec, *x[:4], images=x[4])[0])(*places, rows.images)
    for row, reply in enumerate(done):
        np.testing.assert_allclose(np.asarray(wanted)[row][mask[row]], reply.logprobs, atol=1e-4)
        assert spec.vision.image_token not in reply.tokens
    assert sampler.stats["images"] == 12


def test_a_reply_depends_on_its_own_request_only(sampler):
    asked = requests()
    together = answers(sampler, asked)
    alone = [answers(sampler, [one])[0] for one in reversed(asked)][::-1]
    for one, other in zip(together, alone, strict=True):
        assert one.tokens == other.tokens and one.logprobs.tobytes() == other.logprobs.tobytes()


def test_images_matter(sampler):
    """Another image in the same place, and the same two in another order."""
    first, second = pictures(2)
    params, path = SamplingParams(9), (5, 0, 0)
    ids = prompt((first, second))
    replies = answers(sampler, [(ids, params, path, shown) for shown in ((first, second), (second, first))])
    assert not np.allclose(replies[0].logprobs[:1], replies[1].logprobs[:1], atol=1e-4)


def test_greedy_replies_are_those_of_transformers(model, sampler):
    torch = pytest.importorskip("torch")
    from transformers import Qwen2_5_VLForConditionalGeneration

    directory, spec, _ = model
    theirs = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, torch_dtype=torch.float32).eval()
    vision = spec.vision
    for count in (1, 3):
        shown = pictures(count, seed=count)
        ids = prompt(shown, "right")
        [ours] = answers(sampler, [(ids, SamplingParams(10, 0.0), (6, 0, 0), shown)])
        grid = [[1, SIZE[0] // vision.patch, SIZE[1] // vision.patch]] * count
        out = theirs.generate(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            pixel_values=torch.tensor(patches(shown, vision)), image_grid_thw=torch.tensor(grid),
            max_new_tokens=10, do_sample=False, suppress_tokens=[vision.image_token],
        )  # fmt: skip
        assert out[0, len(ids) :].tolist() == ours.tokens


def patches(shown, vision) -> np.ndarray:
    """As the published image processor cuts them: [patches, 3 * frames * patch * patch], cell by cell."""
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    found = []
    for image in shown:
        scaled = (image / 255 - mean) / std
        for top in range(0, image.shape[0], vision.cell):
            for left in range(0, image.shape[1], vision.cell):
                for y, x in np.ndindex(vision.merge, vision.merge):
                    place = top + y * vision.patch, left + x * vision.patch
                    one = scaled[place[0] : place[0] + vision.patch, place[1] : place[1] + vision.patch]
                    found.append(np.repeat(one.transpose(2, 0, 1)[:, None], vision.frames, axis=1).ravel())
    return np.array(found, np.float32)


def test_a_token_that_is_never_written():
    """Without it the rest has its share; log-probs at temperature 1 are those of the whole vocabulary."""
    rng = np.random.default_rng(0)
    logits = jnp.array(rng.normal(size=(64, 20)), jnp.float32).at[:, 3].set(4.0)
    draws, ones = jnp.array(rng.random((64, 2)), jnp.float32), jnp.ones(64)
    temperature = jnp.where(jnp.arange(64) % 2, 0.0, 1.0)
    filters = (jnp.zeros(64, jnp.int32), ones, 0 * ones)
    settings = logits, draws, temperature, filters
    assert (jax.jit(sample)(*settings)[0] == 3).any()
    tokens, plain, sampled = jax.jit(functools.partial(sample_without, 3))(*settings)
    every = jax.nn.log_softmax(logits)
    rest = jax.nn.log_softmax(logits.at[:, 3].set(-jnp.inf))
    pick = lambda x: np.take_along_axis(np.asarray(x), np.asarray(tokens)[:, None], 1)[:, 0]  # noqa: E731
    assert (tokens != 3).all()
    np.testing.assert_allclose(plain, pick(every), atol=1e-5)
    np.testing.assert_allclose(sampled, np.where(temperature == 0, pick(every), pick(rest)), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids, shown: (ids, ()), "the prompt has 6 image tokens, but its 0 images take 0"),
        (lambda ids, shown: (ids, shown * 2), "6 image tokens, but its 2 images take 12"),
        (lambda ids, shown: (ids, (shown[0][:50],)), r"uint8 \(50, 84, 3\); it must be .* of fitted size"),
        (lambda ids, shown: (ids, (shown[0] / 255,)), "an image is float64"),
        (lambda ids, shown: (ids, (shown[0][..., 0],)), r"uint8 \(56, 84\)"),
        (lambda ids, shown: (ids[: ids.index(WORDS.vision.end_token)], shown), "the prompt ends with an image"),
    ],
)
def test_bad_prompts(sampler, change, message):
    shown = pictures(1)
    ids, shown = change(prompt(shown), shown)
    with pytest.raises(ValueError, match=message):
        sampler.submit(ids, SamplingParams(4), sampler.key((0, 0, 0)), shown)
    assert sampler.pending == 0
