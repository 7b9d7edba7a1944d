"""Images of stage 1 on disk: each once, named by its pixels; and data sets that somebody has tampered with."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from seed_jax import png
from seed_jax.hindsight import annotate, dataset, pictures, records
from seed_jax.hindsight.client import Answer, Client
from seed_jax.hindsight.prompts import analysis_images, analysis_prompt, fit_analyses
from seed_jax.hindsight.records import RecordError
from seed_jax.images import PLACEHOLDER, expand
from seed_jax.train.packing import Shape
from seed_jax.train.stage1_data import LengthError, samples_of
from tests import pictured
from tests.hindsight.test_annotate import GOOD
from tests.hindsight.test_client import Service, answer
from tests.pictured import played, same, tokenizer

GONE = "images/" + "0" * 64 + ".png"


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def as_file(image: np.ndarray, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, form)
    return file.getvalue()


# -- files -------------------------------------------------------------------------------------------------------------


def test_every_picture_is_one_file_however_often_it_was_seen(tmp_path):
    episodes = [played(4), played(4), played(5, won=True)]
    images = [turn.image for episode in episodes for turn in episode.turns]
    pictures.store(tmp_path, images)
    distinct = {image.tobytes() for image in images}
    files = sorted((tmp_path / "images").iterdir())
    assert len(files) == len(distinct) < len(images) and {file.suffix for file in files} == {".png"}
    before = {file: file.stat().st_mtime_ns for file in files}
    pictures.store(tmp_path, images)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "images").iterdir()} == before
    for file in files:
        with Image.open(file) as image:  # by another reader
            assert np.array(image).tobytes() in distinct
    read = pictures.Reader(tmp_path)
    assert same([read(records.image_name(image)) for image in images], images)
    assert read(records.image_name(images[0])) is read(records.image_name(images[4])), "held once"


def test_records_bring_the_pictures_back(tmp_path):
    episode = played(3)
    pictures.store(tmp_path, [turn.image for turn in episode.turns])
    record = json.loads(json.dumps(records.to_record(episode, 0)))
    again = records.to_episode(record, 0, pictures.Reader(tmp_path))
    assert analysis_prompt(again, "released") == analysis_prompt(episode, "released")
    assert same(analysis_images(again), analysis_images(episode))
    assert all(turn.image is None for turn in records.to_episode(record).turns), "reports need none"


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd", "../images/x.png", "images/../../x.png", "images/x.png", f"/{GONE}", f"images//{GONE}",
        GONE.upper(), f"{GONE}\n", f"{GONE}\0", "", None, 7, ["images"], {"image": GONE}, "x" * 100_000,
    ],
)  # fmt: skip
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    with pytest.raises(RecordError, match="cannot be the name of an image; one is images/<64") as error:
        pictures.Reader(tmp_path)(name)
    assert len(str(error.value)) < 1000


def test_files_that_are_not_the_picture_are_refused(tmp_path):
    [turn] = played(1).turns
    pictures.store(tmp_path, [turn.image])
    name = records.image_name(turn.image)
    path, whole = tmp_path / name, (tmp_path / name).read_bytes()
    other = np.array(turn.image)
    other[0, 0] ^= 1
    header = lambda side: chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))  # noqa: E731
    bomb = lambda side: b"\x89PNG\r\n\x1a\n" + header(side) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")  # noqa: E731
    for content, message in (
        (as_file(other), "is not the picture that was stored under this name"),
        (as_file(np.ascontiguousarray(turn.image.transpose(1, 0, 2))), "is not the picture that was stored under"),
        (as_file(turn.image, "JPEG"), "is no whole PNG"),
        (whole[:-40], "is no whole PNG"),
        (b"", "is no whole PNG"),
        (b"MZ" + whole, "is no whole PNG"),
        (as_file(turn.image[:, :, 0]), "is a picture in the mode L, not RGB"),
        (bomb(5000), "is a picture of 5000 x 5000 pixels, more than"),
        (bomb(100_000), "is no whole PNG .*10000000000 pixels"),
        (whole + bytes(png.MAX_BYTES), "has more than .* bytes"),
    ):
        path.write_bytes(content)
        with pytest.raises(RecordError, match=message) as error:
            pictures.Reader(tmp_path)(name)
        assert name in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(RecordError, match="No such file or directory; copy images/ with the files that name"):
        pictures.Reader(tmp_path)(GONE)


# -- skills ------------------------------------------------------------------------------------------------------------


def lines(directory: Path, made, ask, limit: int = 4000, **changes) -> list[dict]:
    """What launch.annotate does with episodes, by way of their files."""
    for episode in made:
        pictures.store(directory, [turn.image for turn in episode.turns])
    noted = [records.to_record(episode, number) for number, episode in enumerate(made)]
    episodes = [records.to_episode(record, 0, pictures.Reader(directory)) for record in noted]
    prompts = fit_analyses(tokenizer(), episodes, "released", limit)
    arguments = {"rules": annotate.Rules(3), "asks": 1, **changes}
    return list(annotate.annotate(noted, episodes, prompts, ask, **arguments))


def test_lines_name_the_pictures_of_their_prompt(tmp_path):
    made = [played(3, "a"), played(8, "b")]
    whole, long = (len(p.ids) for p in fit_analyses(tokenizer(), made, "released", 4000))
    answers = lambda prompts, images: ((i, Answer(GOOD, "stop")) for i in range(len(prompts)))  # noqa: E731
    first, second = lines(tmp_path, made, answers, (whole + long) // 2)
    assert first["images"] == [records.image_name(turn.image) for turn in made[0].turns]
    assert second["elided"] > 0 and second["prompt"].count(PLACEHOLDER) == len(second["images"])
    assert second["images"][0] == records.image_name(made[1].turns[0].image)
    assert second["images"][-1] == records.image_name(made[1].turns[-1].image)


def test_a_second_request_shows_the_pictures_again_and_no_more(tmp_path):
    """Whatever the answer that is sent back with it says."""
    said = {0: "I see <image> and <|image_pad|>.", 1: GOOD}
    with Service(lambda _, number: (200, {}, answer(said[number]))) as service:
        ask = annotate.by_service(Client(service.url, "writer", pause_s=0.01, key=""), 64)
        [line] = lines(tmp_path, [played(3)], ask, asks=2)
        kinds = [[p["type"] for p in body["messages"][0]["content"]] for _, _, body in service.requests]
        last = service.requests[1][2]["messages"][0]["content"][-1]["text"]
    assert kinds[0] == kinds[1] and kinds[0].count("image_url") == 3
    assert "I see <image > and < |image_pad|>." in last and line["skill"] and "earlier answer" not in line["prompt"]


def test_the_policy_writes_about_what_it_saw(tmp_path):
    class Sampler:
        def generate(self, prompts, params, paths, images):
            self.asked = list(zip(prompts, images, strict=True))
            ids = tokenizer()(GOOD)["input_ids"]
            return [Answerlike(ids) for _ in prompts]

    class Answerlike:
        finish = "stop"

        def __init__(self, tokens):
            self.tokens = tokens

    sampler, made = Sampler(), [played(2), played(3)]
    found = lines(tmp_path, made, annotate.by_policy(sampler, tokenizer(), 64))
    assert [line["reason"] for line in found] == ["", ""]
    for (prompt, images), episode in zip(sampler.asked, made, strict=True):
        assert same(images, [turn.image for turn in episode.turns])
        assert prompt.count(tokenizer().vision.image_token) == len(images) * pictured.TOKENS


# -- the data set ------------------------------------------------------------------------------------------------------

SHAPE = Shape(4000, 600, 64, images=40, image_size=pictured.SIZE, vision=tokenizer().vision)


def write_data(directory: Path) -> None:
    made = [played(3 + number % 3, f"t{number}", won=number % 2 == 0) for number in range(8)]
    said = lines(directory, made, lambda prompts, _: ((i, Answer(GOOD, "stop")) for i in range(len(prompts))))
    noted = [records.to_record(episode, number) for number, episode in enumerate(made)]
    dataset.write(directory, *dataset.build(noted, said, fraction=0.2, acting=1.0, seed=0))


def test_rows_become_samples_with_their_pictures(tmp_path):
    write_data(tmp_path)
    train, val, meta = dataset.read(tmp_path)
    rows = [*train, *val]
    assert {row["kind"] for row in rows} == {"skill", "act"}
    assert meta["images"] == len({name for row in rows for name in row["images"]}) >= 3
    assert all(len(row["images"]) == (1 if row["kind"] == "act" else row["prompt"].count("Step ")) for row in rows)
    read = pictures.Reader(tmp_path)
    for row, sample in zip(rows, samples_of(tokenizer(), rows, SHAPE, read), strict=True):
        assert same(sample.images, [read(name) for name in row["images"]])
        place = "<|vision_start|><|image_pad|><|vision_end|>"
        text = f"<|im_start|>user\n{row['prompt'].replace('<image>', place)}<|im_end|>\n<|im_start|>assistant\n"
        assert sample.prompt == expand(tokenizer()(text)["input_ids"], sample.images, tokenizer().vision)
        assert tokenizer().decode(sample.response) == row["response"] + "<|im_end|>"


def test_replies_that_spell_a_picture_teach_no_picture(tmp_path):
    [turn] = played(1).turns
    pictures.store(tmp_path, [turn.image])
    row = {"episode": "e", "prompt": "<image>", "response": "<|image_pad|><image>"}
    row["images"] = [records.image_name(turn.image)]
    [sample] = samples_of(tokenizer(), [row], SHAPE, pictures.Reader(tmp_path))
    assert tokenizer().vision.image_token not in sample.response


def test_hostile_rows_are_one_clear_error(tmp_path):
    write_data(tmp_path)
    train, _, _ = dataset.read(tmp_path)
    row = next(row for row in train if row["kind"] == "skill")
    names, read = row["images"], pictures.Reader(tmp_path)
    small = np.zeros((84, 84, 3), np.uint8)
    pictures.store(tmp_path, [small])
    for change, message in (
        ({"images": names[:-1]}, rf"{len(names)} places for images \(<image>\) and {len(names) - 1} images"),
        ({"prompt": f"{row['prompt']} <image>"}, rf"{len(names) + 1} places .* and {len(names)} images"),
        ({"images": []}, rf"{len(names)} places for images \(<image>\) and 0 images"),
        ({"images": names[0]}, "must be a list of names"),
        ({"images": None}, "must be a list of names"),
        ({"images": [*names[:-1], "../../secret.png"]}, "cannot be the name of an image"),
        ({"images": [*names[:-1], "/etc/passwd"]}, "cannot be the name of an image"),
        ({"images": [*names[:-1], GONE]}, "No such file"),
        ({"images": [*names[:-1], records.image_name(small)]}, r"has 84 x 84 pixels, and the images .* 112 x 140"),
    ):
        with pytest.raises(RecordError, match=message) as error:
            samples_of(tokenizer(), [*train, row | change], SHAPE, read)
        assert "\n" not in str(error.value)


def test_rows_that_are_too_long_say_how_much_is_pictures(tmp_path):
    write_data(tmp_path)
    train, _, _ = dataset.read(tmp_path)
    longest = max(samples_of(tokenizer(), train, SHAPE, pictures.Reader(tmp_path)), key=lambda s: len(s.prompt))
    seen = len(longest.images)
    total = len(longest.prompt) + len(longest.response)
    message = (
        rf"sft\.row_tokens = {total - 1}: .* has {total} tokens \({seen * pictured.TOKENS} of them of {seen} images\)"
    )
    with pytest.raises(LengthError, match=message + r".* a smaller hindsight\.max_analysis_tokens"):
        samples_of(tokenizer(), train, SHAPE._replace(row_tokens=total - 1), pictures.Reader(tmp_path))


def test_rows_of_text_keep_their_form(tmp_path):
    """And a prompt of text may spell the place of an image."""
    rows = [{"episode": "e", "prompt": "what is <image>", "response": "a tag"}]
    [sample] = samples_of(tokenizer(), rows, SHAPE)
    assert tokenizer().vision.image_token not in sample.prompt and sample.images == ()
