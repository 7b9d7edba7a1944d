"""The real tokenizers of Qwen2.5 and Qwen3. SEED_JAX_DATA names the folder with qwen_tokenizers.tar.xz."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from seed_jax import tokenizer as tok

pytestmark = pytest.mark.slow

NAMES = ("qwen2_5", "qwen3")
TASK = "Your task is to: put a clean mug in the cabinet."
TOOL_CALL = '<tool_call>\n{"name": "go_to", "arguments": {"place": "shelf 1"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    archive = Path(os.environ.get("SEED_JAX_DATA", "")) / "qwen_tokenizers.tar.xz"
    if not os.environ.get("SEED_JAX_DATA") or not archive.is_file():
        pytest.skip("SEED_JAX_DATA does not name a folder with qwen_tokenizers.tar.xz")
    folder = tmp_path_factory.mktemp("qwen")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return {name: tok.load_tokenizer(folder / name) for name in NAMES}


@pytest.fixture(params=NAMES)
def tokenizer(tokenizers, request):
    return tokenizers[request.param]


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def rendered(tokenizer, **options) -> str:
    (prompt,) = tok.encode_prompts(tokenizer, [TASK], **options)
    return tokenizer.decode(prompt)


def test_ends_and_padding(tokenizer):
    """A reply ends with <|im_end|>; padding is another token, so it could not be told from an end by its id."""
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 151645)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|endoftext|>", 151643)
    assert tok.encode_response(tokenizer, "<action> look </action>")[-1] == 151645


def test_think_is_one_token_in_qwen3_and_several_in_qwen2_5(tokenizers):
    for tag, number in (("<think>", 151667), ("</think>", 151668)):
        assert ids(tokenizers["qwen3"], tag) == [number]
        assert len(ids(tokenizers["qwen2_5"], tag)) > 1


def test_prompt_of_qwen2_5_has_its_system_message(tokenizers):
    expected = (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{TASK}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rendered(tokenizers["qwen2_5"]) == expected
    # Its template knows no thinking: the option changes nothing.
    assert rendered(tokenizers["qwen2_5"], enable_thinking=False) == expected


def test_prompt_of_qwen3_with_and_without_thinking(tokenizers):
    start = f"<|im_start|>user\n{TASK}<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(tokenizers["qwen3"]) == start
    assert rendered(tokenizers["qwen3"], enable_thinking=True) == start
    assert rendered(tokenizers["qwen3"], enable_thinking=False) == f"{start}<think>\n\n</think>\n\n"
    # What the config says holds for every prompt of a tokenizer.
    for thinking, end in (("template", ""), ("on", ""), ("off", "<think>\n\n</think>\n\n")):
        chosen = tok.load_tokenizer(tokenizers["qwen3"].name_or_path, thinking)
        assert rendered(chosen) == start + end


def test_prompts_are_encoded_as_transformers_does(tokenizer):
    for options in ({}, {"enable_thinking": False}):
        chats = [[{"role": "user", "content": text}] for text in (TASK, "Ünïcödé 你好\n  x")]
        expected = [
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False, **options)
            for chat in chats
        ]
        assert tok.encode_prompts(tokenizer, [chat[0]["content"] for chat in chats], **options) == expected


def test_tool_tags_survive_a_round_trip(tokenizers):
    """Whatever their number of tokens, tags are text of the reply: decoding keeps them."""
    single = {"qwen2_5": {"<tool_call>", "</tool_call>"}}
    single["qwen3"] = single["qwen2_5"] | {"<tool_response>", "</tool_response>", "<think>", "</think>"}
    for name, tokenizer in tokenizers.items():
        for tag in sorted(single["qwen3"]):
            assert (len(ids(tokenizer, tag)) == 1) == (tag in single[name]), (name, tag)
        for text in (
            TOOL_CALL,
            f"<think>\nThe shelf is near.\n</think>\n\n{TOOL_CALL}",
            "<tool_response>\nYou arrive at shelf 1.\n</tool_response>",
            "<think> go on </think> <action> go to shelf 1 </action>",
        ):
            encoded = ids(tokenizer, text)
            assert tok.decode(tokenizer, encoded) == text
            assert tok.decode(tokenizer, [*encoded, tokenizer.eos_token_id]) == text
            assert tok.encode_response(tokenizer, text) == [*encoded, tokenizer.eos_token_id]


def test_tools_and_tool_calls_in_the_chat_template(tokenizer):
    tool = {
        "type": "function",
        "function": {
            "name": "go_to", "description": "Walk to a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }  # fmt: skip
    call = {"type": "function", "function": {"name": "go_to", "arguments": {"place": "shelf 1"}}}
    chat = [
        {"role": "user", "content": TASK},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "You arrive at shelf 1."},
    ]
    text = tokenizer.apply_chat_template(chat, tools=[tool], tokenize=False, add_generation_prompt=True)
    assert "<tools>" in text and '"Walk to a place."' in text
    assert f"{TOOL_CALL}<|im_end|>\n" in text
    assert "<|im_start|>user\n<tool_response>\nYou arrive at shelf 1.\n</tool_response><|im_end|>\n" in text
    assert text.endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(ids(tokenizer, text)) == text
