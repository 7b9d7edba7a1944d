"""Tokenizers: loading a Hugging Face one, rendering a chat prompt to ids, and building the small word-level one of
the quickstart.

The small tokenizer keeps whole phrases and numbered names ("you arrive at", "shelf 1") as single tokens, so that a
model of a million
parameters reads a turn in about seventy tokens and copies a name in one step. It is saved in Hugging Face form like
any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from seed_jax import images as images_lib
from seed_jax.models.vision_spec import VisionSpec

SPECIAL = ("<pad>", "<eos>", "<unk>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' ' }}"
    "{% if m['role'] == 'assistant' %}{{ '<eos> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


# What `rollout.thinking` tells the chat template: nothing, or its argument enable_thinking (Qwen3's has one).
THINKING = {"template": None, "on": True, "off": False}
_INCOMPLETE = "\ufffd"  # what a decoder writes for a character that is not complete


def load_tokenizer(directory: str | Path, thinking: str = "template", vision: VisionSpec | None = None):
    """The tokenizer of a Hugging Face model directory; an error if it cannot end a reply or render a chat.

    thinking: a key of THINKING; it holds for every prompt that is encoded with this tokenizer.
    vision: of the model, if it sees; then prompts may have images.
    """
    from transformers import AutoTokenizer

    if not (Path(directory) / "tokenizer_config.json").is_file():
        raise FileNotFoundError(f"{directory} holds no tokenizer (tokenizer_config.json is missing)")
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    named = json.loads((Path(directory) / "tokenizer_config.json").read_text()).get("tokenizer_class")
    if named == "TokenizersBackend" and type(tokenizer).__name__ != named:
        raise ValueError(
            f"{directory} names the tokenizer class {named}, but transformers chose {type(tokenizer).__name__} for the "
            "model_type in its config.json, which would tokenize differently; use a model_type that keeps the class"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {directory} has no eos_token, so a reply could never end")
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer in {directory} has no chat template")
    tokenizer.enable_thinking, tokenizer.vision = THINKING[thinking], vision
    return tokenizer


def encode_prompts(
    tokenizer,
    prompts: Sequence[str],
    systems: Sequence[str] | None = None,
    before: Sequence[str] | None = None,
    enable_thinking: bool | None = None,
    images: Sequence[Sequence[np.ndarray]] | None = None,
) -> list[list[int]]:
    """Each prompt as one user message with the generation prompt -> token ids.

    systems: a system message for each prompt, "" for none; before: text that precedes the whole rendered chat.
    enable_thinking: passed to the chat template; Qwen3's starts the reply with an empty thought if it is False. None =
        what the tokenizer was loaded with
    images: those of each prompt, of fitted size, in the order of their places (images.PLACEHOLDER) in its text; if no
        prompt has any, the texts are encoded as they are
    Raises ValueError if a prompt has not one place for each image.
    """
    if not prompts:
        return []
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    if systems is not None:
        chats = [
            [{"role": "system", "content": system}, *chat] if system else chat
            for system, chat in zip(systems, chats, strict=True)
        ]
    if enable_thinking is None:
        enable_thinking = getattr(tokenizer, "enable_thinking", None)
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    rendered = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True, **options)
    if before is not None:
        rendered = [first + chat for first, chat in zip(before, rendered, strict=True)]
    vision = getattr(tokenizer, "vision", None)
    if vision is not None:  # what a game or a model writes is text, also where it spells the token of images
        name = tokenizer.convert_ids_to_tokens(vision.image_token)
        rendered = [chat.replace(name, f"{name[:-1]} {name[-1]}") for chat in rendered]
    if images is None or not any(images):
        return tokenizer(rendered, add_special_tokens=False)["input_ids"]
    if vision is None:
        raise ValueError("prompts have images, but the model has no vision; name one that has in model.init")
    place = "".join(tokenizer.convert_ids_to_tokens([vision.start_token, vision.image_token, vision.end_token]))
    rendered = [chat.replace(images_lib.PLACEHOLDER, place) for chat in rendered]
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return [images_lib.expand(*one, vision) for one in zip(ids, images, strict=True)]


def encode_response(tokenizer, text: str) -> list[int]:
    """A reply and its end token -> token ids (for supervised training; sampled replies are never re-encoded)."""
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def decode(tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True)


def token_texts(tokenizer, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text of those before it; a character made of several tokens stands at its last one.

    Only the last few tokens are decoded again for each: decoding every prefix would be quadratic in the reply.
    """
    decode = lambda part: tokenizer.decode(list(part), skip_special_tokens=False)  # noqa: E731
    texts, start, known = [], 0, 0  # tokens start..known are context, known.. wait for their character to be complete
    for stop in range(1, len(ids) + 1):
        before, now = decode(ids[start:known]), decode(ids[start:stop])
        if now.endswith(_INCOMPLETE) and stop < len(ids):
            texts.append("")
            continue
        texts.append(now[len(before) :])
        start, known = known, stop
    return texts


def build_phrase_tokenizer(phrases: Iterable[str], names: Iterable[str], words: Iterable[str], max_number: int):
    """A word-level tokenizer that prefers the longest phrase; everything is lower-cased, white space only separates.

    phrases: strings with spaces or signs that become one token each; names: words that become one token together
        with a following
    number up to `max_number` ("shelf 1"); words: single words, numbers and signs. Anything else is `<unk>`.
    Returns a transformers fast tokenizer (save it with `save_pretrained`).
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    phrases = sorted(set(phrases), key=lambda p: (-len(p), p))
    numbered = [f"{name} {number}" for name in sorted(names) for number in range(1, max_number + 1)]
    vocabulary = list(dict.fromkeys([*SPECIAL, *phrases, *numbered, *sorted(set(words))]))
    pieces = [
        *_phrase_patterns(phrases),
        rf"[a-z]+ [1-{max_number}](?![a-z\d])",
        r"</?[a-z]+>",
        r"[a-z_]+",
        r"\d+",
        r"[^\sa-z\d]",
    ]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), " ")])
    core.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(pieces)), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _phrase_patterns(phrases: Sequence[str]) -> list[str]:
    """One alternative for each first character (a hundred alternatives tried at every position would be slow),
    longest phrase first.

    A phrase matches only as whole words: 'a' inside 'cabinet' or '1' inside '12' must not split.
    """
    groups: dict[str, list[str]] = {}
    for phrase in phrases:
        rest = re.escape(phrase[1:]).replace(r"\ ", " ")
        groups.setdefault(phrase[0], []).append(rest + (r"(?![a-z\d])" if phrase[-1].isalnum() else ""))
    return [
        (r"(?<![a-z\d])" if first.isalnum() else "") + re.escape(first) + f"(?:{'|'.join(rests)})"
        for first, rests in groups.items()
    ]
